-- Acquire or renew a lease, or release it.
-- KEYS: lease    args: holder, ttl_ms (0: release it)
-- Returns 1 if the holder has the lease now, else 0.
local args = cmsgpack.unpack(ARGV[1])
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= args.holder then return 0 end
if args.ttl_ms == 0 then
  redis.call('DEL', KEYS[1])
  return 0
end
redis.call('SET', KEYS[1], args.holder, 'PX', args.ttl_ms)
return 1
