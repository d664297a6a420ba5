-- Prepended to `cancel.lua` to fail calls: posts the event to their gateways, and appends it to their logs.
-- failure: code, message, ids (of the calls), max_entries, mailboxes (prefix of their keys)
local function fail(failure, keep_ms, request, log, item)
  local r = redis.call('HMGET', request, 'attempt', 'reply_to', 'listeners')
  local event = cjson.encode({type = 'failed', request_id = failure.ids[item], attempt = tonumber(r[1]),
    code = failure.code, message = failure.message})
  redis.call('HSET', request, 'state', 'failed')
  redis.call('RPUSH', log, event)
  redis.call('PEXPIRE', log, keep_ms)
  for gateway in string.gmatch(r[2] .. ' ' .. (r[3] or ''), '%S+') do
    redis.call('XADD', failure.mailboxes .. gateway, 'NOMKSTREAM', 'MAXLEN', '~', failure.max_entries, '*',
      'events', '[' .. event .. ']')
  end
end

