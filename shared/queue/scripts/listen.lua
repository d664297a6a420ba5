-- Read the state of a request. While the request is open, its events are also posted to this gateway's mailbox.
-- KEYS: call    args: gateway
-- Returns {state, attempt, tokens, ttl_ms}, or nothing for an unknown request.
local request, gateway = KEYS[1], cmsgpack.unpack(ARGV[1]).gateway
local r = redis.call('HMGET', request, 'state', 'attempt', 'tokens', 'reply_to', 'listeners')
if not r[1] then return {} end
local listeners, is_open = r[5] or '', r[1] == 'queued' or r[1] == 'running'
if is_open and r[4] ~= gateway and not string.find(listeners, gateway .. ' ', 1, true) then
  redis.call('HSET', request, 'listeners', listeners .. gateway .. ' ')
end
return {r[1], tonumber(r[2]), tonumber(r[3]), redis.call('PTTL', request)}
