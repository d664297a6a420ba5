-- Read waiting requests for a worker that has room, then batch requests from the backlog. The oldest batch request joins
-- the queue once it has waited long enough, so that it is not overtaken for ever.
-- KEYS: queue, backlog    args: requests (prefix of the keys of calls), group, worker, count,
--   age_ms (the oldest batch request joins the queue after this time; absent: never)
-- Returns {entries, number of remaining batch calls}.
local queue, backlog = KEYS[1], KEYS[2]
local args = cmsgpack.unpack(ARGV[1])

-- Move batch requests from the backlog to the end of the queue; drop the entries of deleted requests.
local function move(last, count)
  for _, entry in ipairs(redis.call('XRANGE', backlog, '-', last, 'COUNT', count)) do
    local request = args.requests .. entry[2][2]
    redis.call('XDEL', backlog, entry[1])
    if redis.call('HGET', request, 'backlog') == entry[1] then
      local moved = redis.call('XADD', queue, '*', unpack(entry[2]))
      redis.call('HSET', request, 'entry', moved, 'backlog', '')
    end
  end
end

local function read(count)
  local reply = redis.pcall(
    'XREADGROUP', 'GROUP', args.group, args.worker, 'COUNT', count, 'STREAMS', queue, '>')
  if reply and reply.err then return nil, reply end
  return reply and reply[1][2] or {}
end

if args.age_ms then
  local time = redis.call('TIME')
  local before_ms = time[1] * 1000 + math.floor(time[2] / 1000) - args.age_ms
  move(string.format('%.0f', before_ms), 1)
end
local entries = {}
if args.count > 0 then
  local failure
  entries, failure = read(args.count)
  if not entries then return failure end
  local room = args.count - #entries
  if room > 0 then
    move('+', room)
    for _, entry in ipairs(read(room)) do entries[#entries + 1] = entry end
  end
end
return {entries, redis.call('XLEN', backlog)}
