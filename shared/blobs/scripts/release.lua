-- Remove a holder of a blob. The blob expires with its last other holder, but not before linger_ms.
-- KEYS: blob, holders    args: holder, linger_ms
-- Returns the blob's previous time to live in milliseconds.
local args = cmsgpack.unpack(ARGV[1])
local blob, holders = KEYS[1], KEYS[2]
redis.call('ZREM', holders, args.holder)
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local longest = redis.call('ZREVRANGE', holders, 0, 0, 'WITHSCORES')
local ttl_ms = args.linger_ms
if longest[2] then ttl_ms = math.max(ttl_ms, longest[2] - now_ms) end
local left_ms = redis.call('PTTL', blob)
if left_ms > ttl_ms then
  redis.call('PEXPIRE', blob, ttl_ms)
  redis.call('PEXPIRE', holders, ttl_ms)
end
return left_ms
