-- Delete consumers without pending entries: the worker that leaves, and consumers that are idle for idle_ms.
-- KEYS: queue    args: group, worker ('' for none), idle_ms
-- A consumer with pending entries is never deleted, because they would be lost with it.
local args = cmsgpack.unpack(ARGV[1])
local consumers = redis.pcall('XINFO', 'CONSUMERS', KEYS[1], args.group)
if consumers.err then return 0 end
local reaped = 0
for _, fields in ipairs(consumers) do
  local consumer = {}
  for i = 1, #fields, 2 do consumer[fields[i]] = fields[i + 1] end
  local is_old = consumer.idle > args.idle_ms
  if consumer.pending == 0 and (is_old or consumer.name == args.worker) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], args.group, consumer.name)
    reaped = reaped + 1
  end
end
return reaped
