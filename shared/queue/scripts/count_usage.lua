-- Prepended to the scripts that end calls.
-- `count_usage` counts an ended call in the usage of its tenant on this day, and releases its reservation of a budget.
-- A lost call, which was queued again elsewhere, is not counted. `save_usage` writes the counts of all calls.
-- spent: prefix of the keys of one hash per day: `KIND TENANT MODEL` -> sum; empty field -> creation time (us)
-- charge of the call: an optional mark ('*': count no request; '+': also no prompt), number of images, four prices
--   (input, cached, output, image; nano-dollars), reserved budget, key of the budget. Absent: 0 each.
local SPENT_TTL_MS = 93 * 86400000

local KINDS = {'requests', 'input', 'cached', 'images', 'output', 'cost'}
local counted = {} -- sums of `KINDS`, by tenant and model

local USED = {'tenant', 'charge', 'tokens', 'prompt', 'cached'}

-- used: values of the call's fields `USED`
local function count_usage(model, request, used, is_lost)
  local tenant, charge, num_output, num_prompt, num_cached = unpack(used)
  local mark, images, input, cached, output, image, reserved, budget = '', 0, 0, 0, 0, 0, 0, ''
  if charge then
    mark, images, input, cached, output, image, reserved, budget =
      string.match(charge, '^([*+]?)(%d+) (%S+) (%S+) (%S+) (%S+) (%d+) (.*)$')
  end
  -- Do not create a budget that Redis lost: it would never expire. The next request restores it from the usage.
  local has_budget = budget ~= '' and redis.call('EXISTS', budget) == 1
  if not is_lost then
    local num_images = num_prompt and tonumber(images) or 0
    num_prompt, num_cached, num_output = tonumber(num_prompt or 0), tonumber(num_cached or 0), tonumber(num_output)
    if mark == '+' then num_prompt, num_cached, num_images = 0, 0, 0 end
    local cost = (num_prompt - num_cached) * input + num_cached * cached + num_output * output + num_images * image
    cost = math.floor(cost + 0.5)
    local owner = ' ' .. (tenant or '') .. ' ' .. model
    local sums = counted[owner]
    if not sums then sums = {0, 0, 0, 0, 0, 0}; counted[owner] = sums end
    if mark == '' then sums[1] = sums[1] + 1 end
    sums[2], sums[3], sums[4] = sums[2] + num_prompt, sums[3] + num_cached, sums[4] + num_images
    sums[5], sums[6] = sums[5] + num_output, sums[6] + cost
    if has_budget then redis.call('HINCRBY', budget, 'spent', string.format('%.0f', cost)) end
  end
  if budget ~= '' and redis.call('ZREM', budget .. ':open', reserved .. ' ' .. request) == 1 and has_budget then
    redis.call('HINCRBY', budget, 'reserved', '-' .. reserved)
  end
end

local function save_usage(spent)
  if next(counted) == nil then return end
  local now = redis.call('TIME')
  local day = spent .. math.floor(now[1] / 86400)
  for owner, sums in pairs(counted) do
    for place, count in ipairs(sums) do
      if count ~= 0 then
        -- An older ACL may deny this command: then nothing is counted.
        local sum = redis.pcall('HINCRBY', day, KINDS[place] .. owner, string.format('%.0f', count))
        if type(sum) == 'table' then return end
        if sum == count and redis.call('HSETNX', day, '', string.format('%d%06d', now[1], now[2])) == 1 then
          redis.call('PEXPIRE', day, SPENT_TTL_MS)
        end
      end
    end
  end
end
