-- End requests: their last events go to log and mailbox, their entries leave the queue. After `places` and `post`.
-- KEYS: queue, mailbox, dead, places, held, then request and log of each item
-- ARGV: group, keep_ms, max_entries, worker, dead_ttl_ms, max_dead, then of each item:
--   id, entry, attempt, state (finished | failed), index, count, reason, events
--   index, count: as in publish; index '' where the request ends without regard to its tokens
--   reason: why it goes to the dead letters, '' if it does not
-- Returns for each item ok | gone | cancelled | ended | fenced | gap. A repeated call answers ok again.
local queue, mailbox, dead = KEYS[1], KEYS[2], KEYS[3]
local group, keep_ms = ARGV[1], ARGV[2]

local function remove(entry)
  -- First of the writes: it is allowed when memory is full, and lets the others through.
  redis.call('XACK', queue, group, entry)
  redis.call('XDEL', queue, entry)
end

local function bury(id, attempt, reason)
  redis.call('XADD', dead, 'MAXLEN', '~', ARGV[6], '*',
    'id', id, 'reason', reason, 'attempt', attempt, 'worker', ARGV[4])
  redis.call('PEXPIRE', dead, ARGV[5])
end

local verdicts = {}
for item = 1, (#KEYS - 5) / 2 do
  local request, log = KEYS[2 * item + 4], KEYS[2 * item + 5]
  local a = 8 * item - 1
  local id, entry, attempt, state = ARGV[a], ARGV[a + 1], ARGV[a + 2], ARGV[a + 3]
  local index, count, reason, events = ARGV[a + 4], ARGV[a + 5], ARGV[a + 6], ARGV[a + 7]
  local r = redis.call('HMGET', request, 'state', 'attempt', 'tokens', 'place', 'listeners')
  local verdict = 'ok'
  if not r[1] then
    verdict = 'gone'
    remove(entry)
  elseif r[1] == 'cancelled' then
    verdict = 'cancelled'
  elseif r[2] ~= attempt then
    verdict = 'fenced'
  elseif r[1] == 'queued' then
    verdict = 'fenced'
  elseif r[1] == 'running' then
    if index ~= '' and index ~= r[3] then
      verdict = 'gap'
    else
      remove(entry)
      leave(KEYS[4], KEYS[5], r[4])
      redis.call('HSET', request, 'state', state, 'tokens', string.format('%d', r[3] + count), 'payload', '')
      redis.call('RPUSH', log, events)
      redis.call('PEXPIRE', log, keep_ms)
      redis.call('PEXPIRE', request, keep_ms)
      if reason ~= '' then bury(id, attempt, reason) end
      post(mailbox, r[5], events)
    end
  elseif r[1] ~= state then
    verdict = 'ended'
  end
  verdicts[item] = verdict
end
send_posts(ARGV[3])
return verdicts
