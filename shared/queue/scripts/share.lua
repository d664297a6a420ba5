-- Move reserved calls that are unclaimed to the end of the queue, for any worker.
-- KEYS: queue, then the call of each item    args: group, ids (of the calls)
-- Returns the number of moved calls. Claimed calls and calls without a reservation do not change.
local queue = KEYS[1]
local args = cmsgpack.unpack(ARGV[1])
local shared = 0
for i, id in ipairs(args.ids) do
  local request = KEYS[i + 1]
  local r = redis.call('HMGET', request, 'state', 'attempt', 'entry', 'aside', 'aside_home')
  if r[1] == 'queued' and r[2] == '0' and r[3] == r[4] then
    redis.call('XACK', queue, args.group, r[3])
    redis.call('XDEL', queue, r[3])
    redis.call('HSET', request, 'entry', redis.call('XADD', queue, '*', 'id', id), 'home', r[5])
    shared = shared + 1
  end
end
return shared
