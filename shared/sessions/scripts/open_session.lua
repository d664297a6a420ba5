-- Open a session.
-- KEYS: session    args: ttl_ms    raw: its record
local args = cmsgpack.unpack(ARGV[1])
redis.call('HSET', KEYS[1], 'record', ARGV[2], 'state', 'open')
redis.call('PEXPIRE', KEYS[1], args.ttl_ms)
return 1
