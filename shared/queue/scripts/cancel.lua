-- Mark requests as cancelled. Their entries leave the queue at once, so that nobody claims them; a worker
-- that runs one learns it at its next publish or lease renewal. After `places`.
-- KEYS: queue, backlog, places, held, then request and log of each item
-- ARGV: group, keep_ms
-- Returns for each item the state it was in, or gone.
local states = {}
for item = 1, #KEYS / 2 - 2 do
  local request, log = KEYS[2 * item + 3], KEYS[2 * item + 4]
  local r = redis.call('HMGET', request, 'state', 'entry', 'backlog', 'place')
  if r[1] == 'queued' or r[1] == 'running' then
    if not r[3] or r[3] == '' then
      redis.call('XACK', KEYS[1], ARGV[1], r[2])
      redis.call('XDEL', KEYS[1], r[2])
    else
      redis.call('XDEL', KEYS[2], r[3])
    end
    leave(KEYS[3], KEYS[4], r[4])
    redis.call('HSET', request, 'state', 'cancelled')
    redis.call('HDEL', request, 'payload')
    redis.call('PEXPIRE', request, ARGV[2])
    redis.call('DEL', log)
  end
  states[item] = r[1] or 'gone'
end
return states
