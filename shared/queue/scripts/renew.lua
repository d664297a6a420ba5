-- Renew the leases of this worker, and check the requests that may no longer belong to this attempt.
-- KEYS: queue, then the call of each item
-- args: group, worker, queue_ttl_ms, due (entries to renew if they are still this worker's), due_ms (their idle time at
--   least), max_own (bound on this worker's entries), items (to check, and to renew if ok): list of attempt, entry
-- Returns for each item ok | gone | cancelled | ended | fenced.
local queue = KEYS[1]
local args = cmsgpack.unpack(ARGV[1])
local renewed, verdicts = {}, {}

if #args.due > 0 then
  local own = {}
  local pending = redis.pcall(
    'XPENDING', queue, args.group, 'IDLE', args.due_ms, '-', '+', args.max_own, args.worker)
  for _, each in ipairs(pending) do own[each[1]] = true end
  for _, entry in ipairs(args.due) do
    if own[entry] then renewed[#renewed + 1] = entry end
  end
end

for i, item in ipairs(args.items) do
  local r = redis.call('HMGET', KEYS[i + 1], 'state', 'attempt', 'worker')
  if not r[1] then
    verdicts[i] = 'gone'
  elseif r[1] == 'cancelled' then
    verdicts[i] = 'cancelled'
  elseif tonumber(r[2]) ~= item.attempt or r[3] ~= args.worker or r[1] == 'queued' then
    verdicts[i] = 'fenced'
  elseif r[1] ~= 'running' then
    verdicts[i] = 'ended'
  else
    verdicts[i] = 'ok'
    renewed[#renewed + 1] = item.entry
  end
end

local kept = {}
if #renewed > 0 then
  renewed[#renewed + 1] = 'JUSTID'
  for _, entry in ipairs(redis.pcall('XCLAIM', queue, args.group, args.worker, 0, unpack(renewed))) do
    kept[entry] = true
  end
end
for i, item in ipairs(args.items) do
  if verdicts[i] == 'ok' and not kept[item.entry] then verdicts[i] = 'gone' end
end
redis.call('PEXPIRE', queue, args.queue_ttl_ms)
return verdicts
