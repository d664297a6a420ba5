-- Keep the leases of the requests that still belong to this attempt.
-- KEYS: queue, then the request of each item
-- ARGV: group, worker, queue_ttl_ms, then of each item: attempt, entry
-- Returns for each item ok | gone | cancelled | ended | fenced.
local queue = KEYS[1]
local verdicts = {}
for item = 1, #KEYS - 1 do
  local a = 2 * item + 2
  local r = redis.call('HMGET', KEYS[item + 1], 'state', 'attempt')
  local verdict = 'ok'
  if not r[1] then
    verdict = 'gone'
  elseif r[1] == 'cancelled' then
    verdict = 'cancelled'
  elseif r[2] ~= ARGV[a] or r[1] == 'queued' then
    verdict = 'fenced'
  elseif r[1] ~= 'running' then
    verdict = 'ended'
  else
    local kept = redis.pcall('XCLAIM', queue, ARGV[1], ARGV[2], 0, ARGV[a + 1], 'JUSTID')
    if kept.err or #kept == 0 then verdict = 'gone' end
  end
  verdicts[item] = verdict
end
redis.call('PEXPIRE', queue, ARGV[3])
return verdicts
