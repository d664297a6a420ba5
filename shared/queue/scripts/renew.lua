-- Renew the leases of the requests that still belong to this attempt.
-- KEYS: queue, then the call of each item
-- args: group, worker, queue_ttl_ms, items: list of attempt, entry
-- Returns for each item ok | gone | cancelled | ended | fenced.
local queue = KEYS[1]
local args = cmsgpack.unpack(ARGV[1])
local verdicts = {}
for i, item in ipairs(args.items) do
  local r = redis.call('HMGET', KEYS[i + 1], 'state', 'attempt', 'worker')
  local verdict = 'ok'
  if not r[1] then
    verdict = 'gone'
  elseif r[1] == 'cancelled' then
    verdict = 'cancelled'
  elseif tonumber(r[2]) ~= item.attempt or r[3] ~= args.worker or r[1] == 'queued' then
    verdict = 'fenced'
  elseif r[1] ~= 'running' then
    verdict = 'ended'
  else
    local kept = redis.pcall('XCLAIM', queue, args.group, args.worker, 0, item.entry, 'JUSTID')
    if kept.err or #kept == 0 then verdict = 'gone' end
  end
  verdicts[i] = verdict
end
redis.call('PEXPIRE', queue, args.queue_ttl_ms)
return verdicts
