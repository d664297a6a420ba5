-- Keep a picture at least that long. KEYS: image    ARGV: ttl_ms, bytes ('' to keep only what is there)
-- Returns 1 if the picture is there now, 0 if its bytes are needed.
local ttl_ms = redis.call('PTTL', KEYS[1])
if ttl_ms == -2 then
  if ARGV[2] == '' then return 0 end
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[1])
elseif ttl_ms < tonumber(ARGV[1]) then
  redis.call('PEXPIRE', KEYS[1], ARGV[1])
end
return 1
