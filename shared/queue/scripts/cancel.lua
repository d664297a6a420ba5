-- Mark calls as cancelled. Their entries leave the queue at once, so that nobody claims them; a worker
-- that runs one learns it at its next publish or lease renewal.
-- KEYS: queue, backlog, reservations (`submit.lua`), then call and log of each item
-- args: group, keep_ms
-- Returns for each item the state it was in, or gone.
local queue, backlog, reservations = KEYS[1], KEYS[2], KEYS[3]
local args = cmsgpack.unpack(ARGV[1])
local states = {}
for item = 1, (#KEYS - 3) / 2 do
  local request, log = KEYS[2 * item + 2], KEYS[2 * item + 3]
  local r = redis.call('HMGET', request, 'state', 'entry', 'backlog', 'reservation')
  if r[1] == 'queued' or r[1] == 'running' then
    if not r[3] or r[3] == '' then
      redis.call('XACK', queue, args.group, r[2])
      redis.call('XDEL', queue, r[2])
    else
      redis.call('XDEL', backlog, r[3])
    end
    if r[4] and r[4] ~= '' then redis.call('ZADD', reservations, 'XX', 0, r[4]) end
    redis.call('HSET', request, 'state', 'cancelled')
    redis.call('HDEL', request, 'payload')
    redis.call('PEXPIRE', request, args.keep_ms)
    redis.call('DEL', log)
  end
  states[item] = r[1] or 'gone'
end
return states
