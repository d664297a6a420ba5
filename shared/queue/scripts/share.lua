-- Let every worker have calls that were put aside for one which has not claimed them: they join the queue's end.
-- KEYS: queue, then the call of each item    args: group, ids (of the calls)
-- Returns how many there were. What somebody has claimed, and what is in the queue for all, stays as it is.
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
