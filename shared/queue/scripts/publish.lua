-- Append the events of many calls to their logs, end those that end, and post what was accepted as one entry for each
-- gateway.
-- KEYS: mailbox, queue, dead, reservations (`submit.lua`), then call and log of each item
-- args: max_entries, group, keep_ms, dead_ttl_ms, max_dead, items: list of
--   attempt, number (the ordinal of the item within the attempt, so that a repeated call changes nothing),
--   index, count (the first output token of the item and how many there are), and where the call ends:
--   entry, state (finished | failed), perhaps keep_ms of its own, and of a dead letter: id, worker, reason;
--   without index it ends wherever its tokens stand. Items that end come first: see `remove`
-- raw: the events of each item, JSON objects with commas between
-- Returns for each item ok | gone | cancelled | ended | fenced | gap. A repeated call answers ok again.
local mailbox, queue, dead, reservations = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local args = cmsgpack.unpack(ARGV[1])
local function digits(number) return string.format('%d', number) end -- cheaper than Redis turns numbers to text
local keep_ms, max_entries = digits(args.keep_ms), digits(args.max_entries)

-- Accepted events go to the mailbox of the gateway that submitted the call, and of those that listen to it.
-- listeners: ids of gateways, each with a space behind it (`listen.lua`)
local posts = {}

local function post(name, events)
  local noted = posts[name]
  if noted then noted[#noted + 1] = events else posts[name] = {events} end
end

local function append(request, log, item, events)
  redis.call('HSET', request, 'items', digits(item.number), 'tokens', digits(item.index + item.count))
  if redis.call('RPUSH', log, events) == 1 then
    redis.call('PEXPIRE', log, redis.call('PTTL', request))
  end
end

local function remove(entry)
  -- First of the writes: it is allowed when memory is full, and lets the others through.
  redis.call('XACK', queue, args.group, entry)
  redis.call('XDEL', queue, entry)
end

local function finish(request, log, item, events, num_tokens, reservation)
  remove(item.entry)
  if reservation and reservation ~= '' then redis.call('ZADD', reservations, 'XX', '0', reservation) end
  redis.call('HSET', request, 'state', item.state, 'tokens', digits(num_tokens + item.count), 'payload', '')
  redis.call('RPUSH', log, events)
  local kept_ms = item.keep_ms and digits(item.keep_ms) or keep_ms
  redis.call('PEXPIRE', log, kept_ms)
  redis.call('PEXPIRE', request, kept_ms)
  if item.reason then
    redis.call('XADD', dead, 'MAXLEN', '~', args.max_dead, '*',
      'id', item.id, 'reason', item.reason, 'attempt', item.attempt, 'worker', item.worker)
    redis.call('PEXPIRE', dead, args.dead_ttl_ms)
  end
end

local verdicts = {}
for i, item in ipairs(args.items) do
  local request, log, events = KEYS[2 * i + 3], KEYS[2 * i + 4], ARGV[1 + i]
  local r = redis.call('HMGET', request, 'state', 'attempt', 'tokens', 'items', 'listeners', 'reservation')
  local verdict = 'ok'
  if not r[1] then
    verdict = 'gone'
    if item.entry then remove(item.entry) end
  elseif r[1] == 'cancelled' then
    verdict = 'cancelled'
  elseif tonumber(r[2]) ~= item.attempt or r[1] == 'queued' then
    verdict = 'fenced'
  elseif r[1] ~= 'running' then
    if r[1] ~= item.state then verdict = 'ended' end
  elseif item.state or item.number > tonumber(r[4]) then
    if item.index and item.index ~= tonumber(r[3]) then
      verdict = 'gap'
    else
      if item.state then finish(request, log, item, events, r[3], r[6]) else append(request, log, item, events) end
      post(mailbox, events)
      if r[5] then
        for gateway in string.gmatch(r[5], '%S+') do
          post((string.gsub(mailbox, '[^:]+$', gateway, 1)), events)
        end
      end
    end
  end
  verdicts[i] = verdict
end
for name, events in pairs(posts) do
  redis.call('XADD', name, 'NOMKSTREAM', 'MAXLEN', '~', max_entries, '*',
    'events', '[' .. table.concat(events, ',') .. ']')
end
return verdicts
