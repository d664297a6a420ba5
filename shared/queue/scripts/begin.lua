-- Mark an attempt of a possible poison request as started: if its worker is lost from now on, its crash count grows.
-- KEYS: call    args: attempt, worker
-- Returns 1, or 0 if this attempt no longer owns the call.
local args = cmsgpack.unpack(ARGV[1])
local r = redis.call('HMGET', KEYS[1], 'state', 'attempt', 'worker')
if r[1] ~= 'running' or tonumber(r[2]) ~= args.attempt or r[3] ~= args.worker then return 0 end
redis.call('HSET', KEYS[1], 'begun', '1')
return 1
