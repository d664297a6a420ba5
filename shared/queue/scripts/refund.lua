-- Settle ended calls: refund unused reserved tokens per minute, or charge tokens beyond the reservation.
-- KEYS: rates of the tenant (`submit.lua`), then each call
-- args: tokens_per_minute, num_tokens (reserved for each answer)
-- Returns 1, or 0 if a call is still open: run the script again later. Each call is settled once.
local rates = KEYS[1]
local args = cmsgpack.unpack(ARGV[1])
local MINUTE_MS = 60000
local is_over, difference = 1, 0
for key = 2, #KEYS do
  local r = redis.call('HMGET', KEYS[key], 'state', 'tokens', 'refunded')
  if r[1] == 'queued' or r[1] == 'running' then
    is_over = 0
  elseif r[1] and not r[3] then
    redis.call('HSET', KEYS[key], 'refunded', '1')
    difference = difference + r[2] - args.num_tokens
  end
end
if difference ~= 0 and args.tokens_per_minute > 0 then
  local time = redis.call('TIME')
  local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
  local debt_ms = math.max(0, tonumber(redis.call('HGET', rates, 'tokens') or 0) - now_ms)
  local until_ms = now_ms + math.max(0, debt_ms + difference * MINUTE_MS / args.tokens_per_minute)
  redis.call('HSET', rates, 'tokens', string.format('%.3f', until_ms))
  if redis.call('PTTL', rates) < until_ms - now_ms then
    redis.call('PEXPIRE', rates, math.ceil(until_ms - now_ms))
  end
end
return is_over
