-- Mark calls as cancelled. Their entries leave the queue at once, so that nobody claims them; a worker
-- that runs one learns it at its next publish or lease renewal.
-- KEYS: queue, backlog, reservations, held, then call and log of each item
-- args: group, keep_ms
-- Returns for each item the state it was in, or gone.
local queue, backlog, reservations, held = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local args = cmsgpack.unpack(ARGV[1])

-- The sums of what open calls hold; a call counts exactly while its reservation is in the set.
local function count(tenant, tokens, calls)
  local fields = {'tokens', 'tokens:' .. tenant, 'requests:' .. tenant}
  local amounts = {tokens, tokens, calls}
  local sums = redis.call('HMGET', held, unpack(fields))
  local kept, gone = {}, {}
  for i, field in ipairs(fields) do
    local sum = (tonumber(sums[i]) or 0) + amounts[i]
    if sum > 0 then
      kept[#kept + 1], kept[#kept + 2] = field, string.format('%.0f', sum)
    elseif sums[i] then
      gone[#gone + 1] = field
    end
  end
  if #kept > 0 then redis.call('HSET', held, unpack(kept)) end
  if #gone > 0 then redis.call('HDEL', held, unpack(gone)) end
end

local function release(reservation)
  if not reservation or redis.call('ZREM', reservations, reservation) == 0 then return end
  local tokens, tenant = string.match(reservation, '^(%d+) (%S*) ')
  count(tenant, -tokens, -1)
end

local states = {}
for item = 1, #KEYS / 2 - 2 do
  local request, log = KEYS[2 * item + 3], KEYS[2 * item + 4]
  local r = redis.call('HMGET', request, 'state', 'entry', 'backlog', 'place')
  if r[1] == 'queued' or r[1] == 'running' then
    if not r[3] or r[3] == '' then
      redis.call('XACK', queue, args.group, r[2])
      redis.call('XDEL', queue, r[2])
    else
      redis.call('XDEL', backlog, r[3])
    end
    release(r[4])
    redis.call('HSET', request, 'state', 'cancelled')
    redis.call('HDEL', request, 'payload')
    redis.call('PEXPIRE', request, args.keep_ms)
    redis.call('DEL', log)
  end
  states[item] = r[1] or 'gone'
end
return states
