-- End calls: their last events go to log and mailbox, their entries leave the queue.
-- KEYS: queue, mailbox, dead, reservations, held, then call and log of each item
-- args: group, keep_ms, max_entries, worker, dead_ttl_ms, max_dead, items: list of
--   id, entry, attempt, state (finished | failed), count as in publish,
--   index (as in publish; absent where the call ends without regard to its tokens),
--   reason (why it goes to the dead letters, '' if it does not)
-- raw: the events of each item, as in publish
-- Returns for each item ok | gone | cancelled | ended | fenced | gap. A repeated call answers ok again.
local queue, mailbox, dead, reservations, held = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local args = cmsgpack.unpack(ARGV[1])

-- The sums of what open calls hold; a call counts exactly while its reservation is in the set.
local function count(tenant, tokens, calls)
  local fields = {'tokens', 'tokens:' .. tenant, 'requests:' .. tenant}
  local amounts = {tokens, tokens, calls}
  local sums = redis.call('HMGET', held, unpack(fields))
  local kept, gone = {}, {}
  for i, field in ipairs(fields) do
    local sum = (tonumber(sums[i]) or 0) + amounts[i]
    if sum > 0 then
      kept[#kept + 1], kept[#kept + 2] = field, string.format('%.0f', sum)
    elseif sums[i] then
      gone[#gone + 1] = field
    end
  end
  if #kept > 0 then redis.call('HSET', held, unpack(kept)) end
  if #gone > 0 then redis.call('HDEL', held, unpack(gone)) end
end

local function release(reservation)
  if not reservation or redis.call('ZREM', reservations, reservation) == 0 then return end
  local tokens, tenant = string.match(reservation, '^(%d+) (%S*) ')
  count(tenant, -tokens, -1)
end

-- Accepted events go to the mailbox of the gateway that queued the call, and of those that listen to it.
-- listeners: ids of gateways, each with a space behind it (`listen.lua`)
local posts = {}

local function note(name, events)
  local noted = posts[name]
  if noted then noted[#noted + 1] = events else posts[name] = {events} end
end

local function post(listeners, events)
  note(mailbox, events)
  for gateway in string.gmatch(listeners or '', '%S+') do
    note((string.gsub(mailbox, '[^:]+$', gateway, 1)), events)
  end
end

-- One entry for each mailbox that exists.
local function send_posts()
  for name, events in pairs(posts) do
    redis.call('XADD', name, 'NOMKSTREAM', 'MAXLEN', '~', args.max_entries, '*',
      'events', '[' .. table.concat(events, ',') .. ']')
  end
end

local function remove(entry)
  -- First of the writes: it is allowed when memory is full, and lets the others through.
  redis.call('XACK', queue, args.group, entry)
  redis.call('XDEL', queue, entry)
end

local function bury(item)
  redis.call('XADD', dead, 'MAXLEN', '~', args.max_dead, '*',
    'id', item.id, 'reason', item.reason, 'attempt', item.attempt, 'worker', args.worker)
  redis.call('PEXPIRE', dead, args.dead_ttl_ms)
end

local verdicts = {}
for i, item in ipairs(args.items) do
  local request, log, events = KEYS[2 * i + 4], KEYS[2 * i + 5], ARGV[1 + i]
  local r = redis.call('HMGET', request, 'state', 'attempt', 'tokens', 'place', 'listeners')
  local verdict = 'ok'
  if not r[1] then
    verdict = 'gone'
    remove(item.entry)
  elseif r[1] == 'cancelled' then
    verdict = 'cancelled'
  elseif tonumber(r[2]) ~= item.attempt or r[1] == 'queued' then
    verdict = 'fenced'
  elseif r[1] == 'running' then
    if item.index and item.index ~= tonumber(r[3]) then
      verdict = 'gap'
    else
      remove(item.entry)
      release(r[4])
      redis.call('HSET', request, 'state', item.state, 'tokens', r[3] + item.count, 'payload', '')
      redis.call('RPUSH', log, events)
      redis.call('PEXPIRE', log, args.keep_ms)
      redis.call('PEXPIRE', request, args.keep_ms)
      if item.reason ~= '' then bury(item) end
      post(r[5], events)
    end
  elseif r[1] ~= item.state then
    verdict = 'ended'
  end
  verdicts[i] = verdict
end
send_posts()
return verdicts
