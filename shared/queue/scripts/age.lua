-- Batch work is not passed for ever: the oldest joins the queue once it has waited long enough. After `backlog`.
-- KEYS: queue, backlog, the beginning of the keys of requests    ARGV: age_ms
-- Returns how many batch requests are left.
local time = redis.call('TIME')
local before_ms = time[1] * 1000 + math.floor(time[2] / 1000) - ARGV[1]
local oldest = redis.call('XRANGE', KEYS[2], '-', string.format('%.0f', before_ms), 'COUNT', 1)
move(KEYS[1], KEYS[2], KEYS[3], oldest)
return redis.call('XLEN', KEYS[2])
