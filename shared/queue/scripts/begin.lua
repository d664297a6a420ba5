-- A worker is about to run a request that earlier workers may have died of: from now on its end is blamed on it.
-- KEYS: call    args: attempt
-- Returns 1, or 0 if the request is not this attempt's any more.
local args = cmsgpack.unpack(ARGV[1])
local r = redis.call('HMGET', KEYS[1], 'state', 'attempt')
if r[1] ~= 'running' or tonumber(r[2]) ~= args.attempt then return 0 end
redis.call('HSET', KEYS[1], 'begun', '1')
return 1
