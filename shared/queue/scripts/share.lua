-- Return reserved calls that are not claimed to the end of the queue, for any worker.
-- KEYS: queue, then the call of each item    args: group, ids (of the calls)
-- Returns how many were returned. Claimed calls and those without a reservation stay as they are.
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
