-- Forget a call that has failed, so that it may be submitted again under its id; any other stays.
-- KEYS: call, log
-- Returns 1 where nothing is in the way of the id now, else 0.
local state = redis.call('HGET', KEYS[1], 'state')
if state and state ~= 'failed' then return 0 end
redis.call('DEL', KEYS[1], KEYS[2])
return 1
