-- Read the states of calls.
-- KEYS: call of each item
-- Returns for each item {state, attempt, tokens, ttl_ms}; the state of an unknown call is empty.
local found = {}
for item, request in ipairs(KEYS) do
  local fields = redis.call('HMGET', request, 'state', 'attempt', 'tokens')
  found[item] = {fields[1] or '', fields[2] or '0', fields[3] or '0', redis.call('PTTL', request)}
end
return found
