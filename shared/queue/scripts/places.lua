-- Prelude: the places that open requests hold, and the sums that bounds are compared with.
-- places: sorted set of "tokens tenant id", by the time (ms) at which Redis forgets the request
-- held: hash of tokens, and of each tenant that holds a place tokens:{tenant} and requests:{tenant}
-- A request is counted exactly while its place is in the set. So a repeated call changes nothing, and whoever dies
-- without a word is counted no longer than Redis remembers the request.
local function count(held, tenant, tokens, requests)
  local fields = {'tokens', 'tokens:' .. tenant, 'requests:' .. tenant}
  local amounts = {tokens, tokens, requests}
  local sums = redis.call('HMGET', held, unpack(fields))
  local kept, gone = {}, {}
  for i, field in ipairs(fields) do
    local sum = (tonumber(sums[i]) or 0) + amounts[i]
    if sum > 0 then
      kept[#kept + 1], kept[#kept + 2] = field, string.format('%.0f', sum)
    elseif sums[i] then
      gone[#gone + 1] = field
    end
  end
  if #kept > 0 then redis.call('HSET', held, unpack(kept)) end
  if #gone > 0 then redis.call('HDEL', held, unpack(gone)) end
end

local function enter(places, held, tokens, tenant, id, until_ms)
  local place = tokens .. ' ' .. tenant .. ' ' .. id
  redis.call('ZADD', places, until_ms, place)
  count(held, tenant, tokens, 1)
  return place
end

local function leave(places, held, place)
  if not place or redis.call('ZREM', places, place) == 0 then return end
  local tokens, tenant = string.match(place, '^(%d+) (%S*) ')
  count(held, tenant, -tokens, -1)
end

local function forget_expired(places, held, now_ms)
  local expired = redis.call('ZRANGEBYSCORE', places, '-inf', now_ms, 'LIMIT', 0, 100)
  -- The first write of the call: where memory is full it is refused, as ZREM would not be, and with it the call.
  if #expired > 0 then redis.call('HSET', held, 'tokens', redis.call('HGET', held, 'tokens') or '0') end
  for _, place in ipairs(expired) do leave(places, held, place) end
end
