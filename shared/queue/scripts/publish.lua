-- Append the events of many calls to their logs, end the calls that end, and post the accepted events as one entry for
-- each gateway. An attempt is identified by number and worker: after a failover that lost a claim, the number is reused.
-- KEYS: mailbox, queue, dead, reservations (`submit.lua`), then call and log of each item
-- args: worker, max_entries, group, keep_ms, dead_ttl_ms, max_dead, spent, model (`count_usage.lua`), items: list of
--   attempt, number (ordinal of the item within the attempt, which makes a repeated call a no-op),
--   index, count (first output token of the item, and number of its tokens), prompt, cached (tokens, once known), and
--   if the call ends:
--   entry, state (finished | failed), keep_ms (optional), and for a dead letter: id, reason;
--   without index, the call ends at any number of tokens. Items that end their calls come first: see `remove`
-- raw: the events of each item, JSON objects separated by commas
-- Returns for each item ok | gone | cancelled | ended | fenced | gap. A repeated call returns ok.
local mailbox, queue, dead, reservations = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local args = cmsgpack.unpack(ARGV[1])
local function digits(number) return string.format('%d', number) end -- cheaper than Redis's own conversion
local keep_ms, max_entries = digits(args.keep_ms), digits(args.max_entries)

-- Accepted events are posted to the gateway that submitted the call, and to its listeners.
-- listeners: ids of gateways, each followed by a space (`listen.lua`)
local posts = {}

local function post(name, events)
  local noted = posts[name]
  if noted then noted[#noted + 1] = events else posts[name] = {events} end
end

local function prompt_fields(item)
  if item.prompt then return 'prompt', digits(item.prompt), 'cached', digits(item.cached) end
end

local function append(request, log, item, events)
  redis.call('HSET', request, 'items', digits(item.number), 'tokens', digits(item.index + item.count),
    prompt_fields(item))
  if redis.call('RPUSH', log, events) == 1 then
    redis.call('PEXPIRE', log, redis.call('PTTL', request))
  end
end

local function remove(entry)
  -- XACK must be the script's first write: Redis allows it when memory is full, and afterwards all writes of the script.
  redis.call('XACK', queue, args.group, entry)
  redis.call('XDEL', queue, entry)
end

local function finish(request, log, item, events, r)
  remove(item.entry)
  if r[6] and r[6] ~= '' then redis.call('ZADD', reservations, 'XX', '0', r[6]) end
  local num_tokens = r[3] + item.count
  redis.call('HSET', request, 'state', item.state, 'tokens', digits(num_tokens), 'payload', '')
  count_usage(args.model, request, {r[8], r[9], num_tokens, item.prompt or r[10], item.cached or r[11]})
  redis.call('RPUSH', log, events)
  local kept_ms = item.keep_ms and digits(item.keep_ms) or keep_ms
  redis.call('PEXPIRE', log, kept_ms)
  redis.call('PEXPIRE', request, kept_ms)
  if item.reason then
    redis.call('XADD', dead, 'MAXLEN', '~', args.max_dead, '*',
      'id', item.id, 'reason', item.reason, 'attempt', item.attempt, 'worker', args.worker)
    redis.call('PEXPIRE', dead, args.dead_ttl_ms)
  end
end

local ENDED, NONE = {'tenant', 'charge', 'prompt', 'cached'}, {}
local verdicts = {}
for i, item in ipairs(args.items) do
  local request, log, events = KEYS[2 * i + 3], KEYS[2 * i + 4], ARGV[1 + i]
  local r = redis.call('HMGET', request, 'state', 'attempt', 'tokens', 'items', 'listeners', 'reservation', 'worker',
    unpack(item.state and ENDED or NONE))
  local verdict = 'ok'
  if not r[1] then
    verdict = 'gone'
    if item.entry then remove(item.entry) end
  elseif r[1] == 'cancelled' then
    verdict = 'cancelled'
  elseif tonumber(r[2]) ~= item.attempt or r[7] ~= args.worker or r[1] == 'queued' then
    verdict = 'fenced'
  elseif r[1] ~= 'running' then
    if r[1] ~= item.state then verdict = 'ended' end
  elseif item.state or item.number > tonumber(r[4]) then
    if item.index and item.index ~= tonumber(r[3]) then
      verdict = 'gap'
    else
      if item.state then finish(request, log, item, events, r) else append(request, log, item, events) end
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
save_usage(args.spent)
for name, events in pairs(posts) do
  redis.call('XADD', name, 'NOMKSTREAM', 'MAXLEN', '~', max_entries, '*',
    'events', '[' .. table.concat(events, ',') .. ']')
end
return verdicts
