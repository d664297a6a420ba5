-- Close a session to new tasks, if it exists.
-- KEYS: session
-- Returns 1, or 0 if it has expired.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('HSET', KEYS[1], 'state', 'closed')
return 1
