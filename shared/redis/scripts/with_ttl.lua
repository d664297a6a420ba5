-- Run a command that may create a key, and set the key's time to live, even if the command fails.
-- KEYS: key    ARGV: ttl_ms, the command
-- Returns the command's reply.
local reply = redis.pcall(unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return reply
