-- Prelude: accepted events go to the mailbox of the gateway that queued the request, and of those that listen to it.
-- listeners: ids of gateways, each with a space behind it (`listen.lua`)
local posts = {}

local function note(mailbox, events)
  local noted = posts[mailbox]
  if noted then noted[#noted + 1] = events else posts[mailbox] = {events} end
end

local function post(mailbox, listeners, events)
  note(mailbox, events)
  for gateway in string.gmatch(listeners or '', '%S+') do
    note((string.gsub(mailbox, '[^:]+$', gateway, 1)), events)
  end
end

-- One entry for each mailbox that exists.
local function send_posts(max_entries)
  for mailbox, events in pairs(posts) do
    redis.call('XADD', mailbox, 'NOMKSTREAM', 'MAXLEN', '~', max_entries, '*',
      'events', '[' .. table.concat(events, ',') .. ']')
  end
end
