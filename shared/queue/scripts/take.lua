-- Give a worker that has room what waits in the queue, and batch work where that leaves room.
-- KEYS: queue, backlog    args: requests (the beginning of the keys of calls), group, worker, count (at least 1)
-- Returns {entries, how many batch calls are left}.
local queue, backlog = KEYS[1], KEYS[2]
local args = cmsgpack.unpack(ARGV[1])

-- Batch work moves from the backlog, where nobody claims it, to the end of the queue. Of what Redis has forgotten
-- nothing is moved.
local function move(entries)
  for _, entry in ipairs(entries) do
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

local entries, failure = read(args.count)
if not entries then return failure end
local room = args.count - #entries
if room > 0 then
  move(redis.call('XRANGE', backlog, '-', '+', 'COUNT', room))
  for _, entry in ipairs(read(room)) do entries[#entries + 1] = entry end
end
return {entries, redis.call('XLEN', backlog)}
