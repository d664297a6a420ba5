-- Write the record of a key, unless a record of the same or a later version exists.
-- KEYS: api_keys    args: name, version, token, ttl_ms    ARGV[2]: the record, which begins with its version and a space
-- Returns 1 if Redis now has this record, else 0.
local args = cmsgpack.unpack(ARGV[1])
local current = redis.call('HGET', KEYS[1], args.name)
if current == ARGV[2] then return 1 end  -- a repeated call, whose first reply was lost
local version = current and tonumber(string.match(current, '^%d+')) or 0
if version >= args.version then return 0 end
redis.call('HSET', KEYS[1], args.name, ARGV[2])
redis.call('HSET', KEYS[1], '', args.token)  -- tells gateways to read the records again
redis.call('PEXPIRE', KEYS[1], args.ttl_ms)
return 1
