-- Prelude: what a tenant may take a minute. After `places`.
-- rates: hash of two instants (ms), requests and tokens: when all that was taken is earned again
-- There is at most a minute's worth; where one is left, more may be taken, into debt, which is waited for later.
-- Less than nothing is given back: what a request turned out not to need.
local MINUTE_MS = 60000

local function owed_ms(rates, rate, now_ms)
  return math.max(0, tonumber(redis.call('HGET', rates, rate.field) or 0) - now_ms)
end

-- How long until something may be taken; 0 is now. rate: field, most (a minute; 0: any), amount
local function find_pause_ms(rates, rate, now_ms)
  if rate.most == 0 then return 0 end
  return owed_ms(rates, rate, now_ms) - (MINUTE_MS - MINUTE_MS / rate.most)
end

local function spend(rates, rate, now_ms)
  if rate.most == 0 then return end
  local until_ms = now_ms + math.max(0, owed_ms(rates, rate, now_ms) + rate.amount * MINUTE_MS / rate.most)
  redis.call('HSET', rates, rate.field, string.format('%.3f', until_ms))
  if redis.call('PTTL', rates) < until_ms - now_ms then
    redis.call('PEXPIRE', rates, math.ceil(until_ms - now_ms))
  end
end

-- Whether so many tokens more are too many: of all, or of a tenant once half of all are held.
local function find_crowd(held, tenant, tokens, requests, max_tokens, max_requests)
  local sums = redis.call('HMGET', held, 'tokens', 'tokens:' .. tenant, 'requests:' .. tenant)
  local all, own, open = tonumber(sums[1] or 0), tonumber(sums[2] or 0), tonumber(sums[3] or 0)
  if all > 0 and all + tokens > max_tokens then return 'open_tokens' end
  if max_requests > 0 and open > 0 and open + requests > max_requests then return 'key_open' end
  if own > 0 and all + tokens > max_tokens / 2 then
    local num_tenants = (redis.call('HLEN', held) - 1) / 2
    if own + tokens > max_tokens / num_tenants then return 'key_share' end
  end
  return nil
end
