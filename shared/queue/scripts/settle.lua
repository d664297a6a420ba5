-- Answers have ended: their tenant pays for what they were, and no longer for what they might have been. After `bounds`.
-- KEYS: rates of the tenant, then the request of each answer
-- ARGV: tokens a minute, tokens that were taken for each answer
-- Returns 1, or 0 if one of them goes on and the call is to be made again. Each is settled once.
local is_over, difference = 1, 0
for key = 2, #KEYS do
  local r = redis.call('HMGET', KEYS[key], 'state', 'tokens', 'settled')
  if r[1] == 'queued' or r[1] == 'running' then
    is_over = 0
  elseif r[1] and not r[3] then
    redis.call('HSET', KEYS[key], 'settled', '1')
    difference = difference + r[2] - ARGV[2]
  end
end
if difference ~= 0 then
  local time = redis.call('TIME')
  local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
  spend(KEYS[1], {field = 'tokens', most = tonumber(ARGV[1]), amount = difference}, now_ms)
end
return is_over
