-- Record the outcome of each task once, and delete tasks that were not queued (`forgotten`).
-- KEYS: session, tasks, open, order    args: states (by task id: succeed, failed, cancelled, or forgotten)
local session, tasks, open, order = unpack(KEYS)
local args = cmsgpack.unpack(ARGV[1])
if redis.call('EXISTS', session) == 0 then return 0 end
for id, state in pairs(args.states) do
  local record = redis.call('HGET', open, id)
  if record then
    redis.call('HDEL', open, id)
    if state == 'forgotten' then
      redis.call('HDEL', tasks, id)
      redis.call('ZREM', order, id)
    else
      redis.call('HSET', tasks, id, state .. ' ' .. record)
      redis.call('HINCRBY', session, state, 1)
    end
  end
end
return 1
