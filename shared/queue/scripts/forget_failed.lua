-- Delete a failed call, so that it may be submitted again under its id; any other stays.
-- KEYS: call, log
-- Returns 1 if the id is free now, else 0.
local state = redis.call('HGET', KEYS[1], 'state')
if state and state ~= 'failed' then return 0 end
redis.call('DEL', KEYS[1], KEYS[2])
return 1
