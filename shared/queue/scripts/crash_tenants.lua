-- The tenants whose requests a worker was running when it crashed: requests that it still holds, that it released when
-- its engine failed, or that were cancelled shortly before.
-- KEYS: queue, crash, left (`cancel.lua`)    args: group, worker, requests (prefix of the keys of calls), left_ttl_ms
-- Returns their names; a request that only waited to run alone does not count.
local args = cmsgpack.unpack(ARGV[1])
local tenants = {}
for _, tenant in ipairs(redis.call('SMEMBERS', KEYS[2])) do tenants[tenant] = true end
local time = redis.call('TIME')
local since_ms = time[1] * 1000 + math.floor(time[2] / 1000) - args.left_ttl_ms
local left = redis.pcall('HGETALL', KEYS[3])
for i = 1, #left, 2 do
  if tonumber(left[i + 1]) >= since_ms then tenants[left[i]] = true end
end
local pending = redis.pcall('XPENDING', KEYS[1], args.group, '-', '+', 1000, args.worker)
for _, each in ipairs(pending.err and {} or pending) do
  local entry = redis.call('XRANGE', KEYS[1], each[1], each[1])[1]
  if entry and entry[2][1] == 'id' then
    local r = redis.call('HMGET', args.requests .. entry[2][2], 'state', 'worker', 'begun', 'tenant')
    if r[1] == 'running' and r[2] == args.worker and r[3] == '1' then tenants[r[4] or ''] = true end
  end
end
local names = {}
for tenant in pairs(tenants) do names[#names + 1] = tenant end
return names
