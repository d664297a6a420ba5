-- Append the events of many calls to their logs and post those accepted as one entry for each gateway.
-- KEYS: mailbox, then call and log of each item
-- args: max_entries, items: list of
--   attempt, number (the how-maniest item of this attempt, so that a repeated call changes nothing),
--   index, count (the first output token of the item and how many there are)
-- raw: the events of each item, JSON objects with commas between
-- Returns for each item ok | gone | cancelled | ended | fenced | gap.
local mailbox = KEYS[1]
local args = cmsgpack.unpack(ARGV[1])

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

local verdicts = {}
for i, item in ipairs(args.items) do
  local request, log, events = KEYS[2 * i], KEYS[2 * i + 1], ARGV[1 + i]
  local r = redis.call('HMGET', request, 'state', 'attempt', 'tokens', 'items', 'listeners')
  local verdict = 'ok'
  if not r[1] then
    verdict = 'gone'
  elseif r[1] == 'cancelled' then
    verdict = 'cancelled'
  elseif tonumber(r[2]) ~= item.attempt then
    verdict = 'fenced'
  elseif r[1] ~= 'running' then
    verdict = r[1] == 'queued' and 'fenced' or 'ended'
  elseif item.number > tonumber(r[4]) then
    if tonumber(r[3]) ~= item.index then
      verdict = 'gap'
    else
      redis.call('HSET', request, 'items', item.number, 'tokens', item.index + item.count)
      if redis.call('RPUSH', log, events) == 1 then
        redis.call('PEXPIRE', log, redis.call('PTTL', request))
      end
      post(r[5], events)
    end
  end
  verdicts[i] = verdict
end
send_posts()
return verdicts
