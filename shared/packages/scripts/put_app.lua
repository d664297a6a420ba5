-- Replace a deployment's record, unless it has changed since it was read.
-- KEYS: apps    args: name, version (that was read; 0: none), ttl_ms    ARGV[2]: the new record; '': delete it
-- Returns 1, or 0 if the record has another version.
local args = cmsgpack.unpack(ARGV[1])
local current = redis.call('HGET', KEYS[1], args.name)
local version = current and tonumber(string.match(current, '^%d+')) or 0
if version ~= args.version then return 0 end
if ARGV[2] == '' then redis.call('HDEL', KEYS[1], args.name)
else redis.call('HSET', KEYS[1], args.name, ARGV[2]) end
redis.call('PEXPIRE', KEYS[1], args.ttl_ms)
return 1
