-- Give requests back, so that another worker continues them at once.
-- KEYS: queue, then the request of each item
-- ARGV: group, released (consumer), blame, then of each item: attempt ('' if never claimed), entry
--   blame 1: the attempt counts as a failure of the request
-- Returns how many were given back. Each leaves a nudge in the queue, which wakes one waiting worker.
local queue = KEYS[1]
local released = 0
for item = 1, #KEYS - 1 do
  local attempt, entry = ARGV[2 * item + 2], ARGV[2 * item + 3]
  local request = KEYS[item + 1]
  local r = redis.call('HMGET', request, 'state', 'attempt')
  local is_unclaimed = attempt == '' and r[1] == 'queued'
  if is_unclaimed or (r[1] == 'running' and r[2] == attempt) then
    if ARGV[3] == '0' then
      redis.call('HSET', request, 'state', 'queued')
    else
      redis.call('HSET', request, 'claim', '')  -- it did run: whoever claims it next does not repeat a lost call
    end
    redis.call('XCLAIM', queue, ARGV[1], ARGV[2], 0, entry, 'IDLE', 3600000, 'JUSTID')
    redis.call('XADD', queue, '*', 'nudge', entry)
    released = released + 1
  end
end
return released
