-- The tenants whose requests a worker ran when it ended: those it still holds, and those it gave back as it failed.
-- KEYS: queue, crash    args: group, worker, requests (the beginning of the keys of calls)
-- Returns their names; a request that only waited to run alone does not count.
local args = cmsgpack.unpack(ARGV[1])
local tenants = {}
for _, tenant in ipairs(redis.call('SMEMBERS', KEYS[2])) do tenants[tenant] = true end
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
