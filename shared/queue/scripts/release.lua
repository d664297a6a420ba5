-- Return requests to the queue, so that another worker continues them immediately.
-- KEYS: queue, then the call of each item
-- args: group, released (consumer), is_crash (whether the attempt counts as a crash of the request), crashes (prefix of
--   the keys of crash tenants), crash_ttl_ms, items: list of attempt (absent if never claimed), entry
-- Returns the number of released requests. Each adds a wakeup entry to the queue, which wakes one waiting worker.
local queue = KEYS[1]
local args = cmsgpack.unpack(ARGV[1])
local released = 0
for i, item in ipairs(args.items) do
  local request = KEYS[i + 1]
  local r = redis.call('HMGET', request, 'state', 'attempt', 'worker', 'begun', 'tenant')
  local is_unclaimed = not item.attempt and r[1] == 'queued'
  if is_unclaimed or (r[1] == 'running' and tonumber(r[2]) == item.attempt) then
    if not args.is_crash then
      redis.call('HSET', request, 'state', 'queued')
    else
      redis.call('HSET', request, 'claim', '')  -- it ran: the next claim is a new attempt
      if r[4] == '1' then
        redis.call('SADD', args.crashes .. r[3], r[5] or '')
        redis.call('PEXPIRE', args.crashes .. r[3], args.crash_ttl_ms)
      end
    end
    redis.call('XCLAIM', queue, args.group, args.released, 0, item.entry, 'IDLE', 3600000, 'JUSTID')
    redis.call('XADD', queue, '*', 'nudge', item.entry)
    released = released + 1
  end
end
return released
