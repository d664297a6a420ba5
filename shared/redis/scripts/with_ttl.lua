-- Run a command that may make a key, and give the key its time to live, also where the command fails.
-- KEYS: key    ARGV: ttl_ms, the command
-- Returns what the command answers.
local reply = redis.pcall(unpack(ARGV, 2))
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return reply
