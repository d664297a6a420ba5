-- Prepended to the scripts that end calls.
-- Count an ended call in the usage of its tenant on this day, and correct what it has reserved of a budget. A lost call,
-- which was queued again elsewhere, is not counted.
-- spent: prefix of the keys of days: hash of sums by `KIND TENANT MODEL`, and under the empty name when it was created (us)
-- charge of the call: '*' if it counts its prompt and not the request, '+' if neither; number of images, price of an input,
--   cached and output token and of an image (nano-dollars), and of a budget: what is reserved, and its key. Absent: 0 each.
local SPENT_TTL_MS = 93 * 86400000

local function count_usage(spent, model, request, is_lost)
  local r = redis.call('HMGET', request, 'tenant', 'prompt', 'cached', 'tokens', 'charge')
  local mark, images, input, cached, output, image, reserved, budget = '', 0, 0, 0, 0, 0, 0, ''
  if r[5] then
    mark, images, input, cached, output, image, reserved, budget =
      string.match(r[5], '^([*+]?)(%d+) (%S+) (%S+) (%S+) (%S+) (%d+) (.*)$')
  end
  local num_requests, num_input, num_cached, num_images = 0, 0, 0, 0
  if not is_lost then
    if mark == '' then num_requests = 1 end
    if mark ~= '+' then
      num_input, num_cached = tonumber(r[2] or 0), tonumber(r[3] or 0)
      if r[2] then num_images = tonumber(images) end
    end
    local cost = (num_input - num_cached) * input + num_cached * cached + r[4] * output + num_images * image
    cost = string.format('%.0f', math.floor(cost + 0.5))
    local now = redis.call('TIME')
    local day, owner = spent .. math.floor(now[1] / 86400), ' ' .. (r[1] or '') .. ' ' .. model
    -- An older ACL may not allow this: then nothing is counted.
    local sum = redis.pcall('HINCRBY', day, 'requests' .. owner, num_requests)
    if type(sum) == 'table' then return end
    if sum == num_requests and redis.call('HSETNX', day, '', string.format('%d%06d', now[1], now[2])) == 1 then
      redis.call('PEXPIRE', day, SPENT_TTL_MS)
    end
    if num_input > 0 then redis.call('HINCRBY', day, 'input' .. owner, r[2]) end
    if num_cached > 0 then redis.call('HINCRBY', day, 'cached' .. owner, r[3]) end
    if num_images > 0 then redis.call('HINCRBY', day, 'images' .. owner, images) end
    if r[4] ~= '0' then redis.call('HINCRBY', day, 'output' .. owner, r[4]) end
    if cost ~= '0' then redis.call('HINCRBY', day, 'cost' .. owner, cost) end
    if budget ~= '' then redis.call('HINCRBY', budget, 'spent', cost) end
  end
  if budget ~= '' and redis.call('ZREM', budget .. ':open', reserved .. ' ' .. request) == 1 then
    redis.call('HINCRBY', budget, 'reserved', '-' .. reserved)
  end
end

