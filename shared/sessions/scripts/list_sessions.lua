-- Sessions of a page, with their open tasks.
-- KEYS: session and open of each item    args: max_open (records of open tasks in all)
-- Returns for each item {record, state, succeed, failed, cancelled, number of open tasks, their records}; the record
-- is empty if the session has expired. Open tasks of sessions beyond `max_open` are only counted.
local args = cmsgpack.unpack(ARGV[1])
local left, found = args.max_open, {}
for item = 1, #KEYS / 2 do
  local session, open = KEYS[2 * item - 1], KEYS[2 * item]
  local r = redis.call('HMGET', session, 'record', 'state', 'succeed', 'failed', 'cancelled')
  local num_open, records = redis.call('HLEN', open), {}
  if num_open <= left then
    left = left - num_open
    records = redis.call('HVALS', open)
  end
  found[item] = {r[1] or '', r[2] or '', r[3] or '0', r[4] or '0', r[5] or '0', num_open, records}
end
return found
