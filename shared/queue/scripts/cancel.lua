-- Cancel calls, or fail them if a failure is given (`fail.lua`). The entries leave the queue immediately, so that no worker
-- claims them. A worker that runs a cancelled call learns of it from its stream of wakeups, or from its next publish.
-- KEYS: queue, backlog, reservations (`submit.lua`), then call and log of each item
-- args: group, keep_ms, spent, model, is_lost (`count_usage.lua`; may be absent), left (prefix of the keys of
--   `note_tenant`), left_ttl_ms, wakeups (prefix of the keys of streams, `wake.lua`); failure: absent, or see `fail.lua`
-- Returns for each item its earlier state, or gone.
local queue, backlog, reservations = KEYS[1], KEYS[2], KEYS[3]
local args = cmsgpack.unpack(ARGV[1])
local failure = args.failure
local states = {}

local time = redis.call('TIME')
local now_ms = string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000))

-- The worker can run the call for a little longer. If it crashes meanwhile, `crash_tenants.lua` counts the call's tenant.
local function note_tenant(request, worker)
  local r = redis.call('HMGET', request, 'begun', 'tenant')
  if r[1] ~= '1' then return end
  redis.pcall('HSET', args.left .. worker, r[2] or '', now_ms)  -- pcall: an older ACL may not allow it
  redis.pcall('PEXPIRE', args.left .. worker, args.left_ttl_ms)
end

for item = 1, (#KEYS - 3) / 2 do
  local request, log = KEYS[2 * item + 2], KEYS[2 * item + 3]
  local r = redis.call('HMGET', request, 'state', 'entry', 'backlog', 'reservation', 'worker')
  if r[1] == 'queued' or r[1] == 'running' then
    if not r[3] or r[3] == '' then
      redis.call('XACK', queue, args.group, r[2])
      redis.call('XDEL', queue, r[2])
    else
      redis.call('XDEL', backlog, r[3])
    end
    if r[1] == 'running' then wake(args.wakeups .. r[5], 'lost', r[2]) end
    if r[4] and r[4] ~= '' then redis.call('ZADD', reservations, 'XX', 0, r[4]) end
    if failure then
      fail(failure, args.keep_ms, request, log, item)
    else
      if r[1] == 'running' then note_tenant(request, r[5]) end
      redis.call('HSET', request, 'state', 'cancelled')
      redis.call('DEL', log)
    end
    count_usage(args.model, request, redis.call('HMGET', request, unpack(USED)), args.is_lost)
    redis.call('HDEL', request, 'payload')
    redis.call('PEXPIRE', request, args.keep_ms)
  end
  states[item] = r[1] or 'gone'
end
save_usage(args.spent)
return states
