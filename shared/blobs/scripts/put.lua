-- Store a blob for a holder, or renew it.
-- KEYS: blob, holders    args: ttl_ms, holder    raw: bytes ('': renew the stored blob)
-- holders: sorted set of the requests that need the blob, by their expiry (ms)
-- Returns 1 if the blob is stored, 0 if its bytes are needed.
local args = cmsgpack.unpack(ARGV[1])
local blob, holders, ttl_ms = KEYS[1], KEYS[2], args.ttl_ms
local left_ms = redis.call('PTTL', blob)
if left_ms == -2 then
  if ARGV[2] == '' then return 0 end
  redis.call('SET', blob, ARGV[2], 'PX', ttl_ms)
elseif left_ms < ttl_ms then
  redis.call('PEXPIRE', blob, ttl_ms)
end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', holders, 'GT', string.format('%.0f', now_ms + ttl_ms), args.holder)
redis.call('PEXPIRE', holders, math.max(left_ms, ttl_ms))
return 1
