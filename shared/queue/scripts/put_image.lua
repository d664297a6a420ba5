-- Keep a image for a request, at least that long.
-- KEYS: image, holders    ARGV: ttl_ms, holder, bytes ('' to keep only what is there)
-- Holders are the requests that need the image, each with the time until when at most.
-- Returns 1 if the image is there now, 0 if its bytes are needed.
local image, holders, ttl_ms = KEYS[1], KEYS[2], tonumber(ARGV[1])
local left_ms = redis.call('PTTL', image)
if left_ms == -2 then
  if ARGV[3] == '' then return 0 end
  redis.call('SET', image, ARGV[3], 'PX', ttl_ms)
elseif left_ms < ttl_ms then
  redis.call('PEXPIRE', image, ttl_ms)
end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', holders, 'GT', string.format('%.0f', now_ms + ttl_ms), ARGV[2])
redis.call('PEXPIRE', holders, math.max(left_ms, ttl_ms))
return 1
