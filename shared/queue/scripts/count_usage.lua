-- The beginning of the scripts that end calls.
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
  local function free()
    if budget ~= '' and redis.call('ZREM', budget .. ':open', reserved .. ' ' .. request) == 1 then
      redis.call('HINCRBY', budget, 'reserved', '-' .. reserved)
    end
  end
  if is_lost then return free() end
  local counts = {requests = 0, input = 0, cached = 0, images = 0, output = tonumber(r[4])}
  if mark ~= '+' then
    counts = {requests = mark == '' and 1 or 0, input = tonumber(r[2] or 0), cached = tonumber(r[3] or 0), output = counts.output,
      images = r[2] and tonumber(images) or 0}
  end
  counts.cost = math.floor((counts.input - counts.cached) * input + counts.cached * cached + counts.output * output
    + counts.images * image + 0.5)
  local now_s, now_us = unpack(redis.call('TIME'))
  local day, owner = spent .. string.format('%d', now_s / 86400), ' ' .. (r[1] or '') .. ' ' .. model
  -- A user of an older release may not write here: then nothing is counted.
  local num_requests = redis.pcall('HINCRBY', day, 'requests' .. owner, counts.requests)
  if type(num_requests) == 'table' then return end
  if num_requests == counts.requests and redis.call('HSETNX', day, '', string.format('%d%06d', now_s, now_us)) == 1 then
    redis.call('PEXPIRE', day, SPENT_TTL_MS)
  end
  counts.requests = 0
  for kind, count in pairs(counts) do
    if count > 0 then redis.call('HINCRBY', day, kind .. owner, string.format('%.0f', count)) end
  end
  free()
  if budget ~= '' then redis.call('HINCRBY', budget, 'spent', string.format('%.0f', counts.cost)) end
end

