-- Give a worker that has room what waits in the queue, and batch work where that leaves room. After `backlog`.
-- KEYS: queue, backlog, the beginning of the keys of requests    ARGV: group, worker, count (at least 1)
-- Returns {entries, how many batch requests are left}.
local queue, backlog = KEYS[1], KEYS[2]

local function read(count)
  local reply = redis.pcall(
    'XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', count, 'STREAMS', queue, '>')
  if reply and reply.err then return nil, reply end
  return reply and reply[1][2] or {}
end

local entries, failure = read(ARGV[3])
if not entries then return failure end
local room = ARGV[3] - #entries
if room > 0 then
  move(queue, backlog, KEYS[3], redis.call('XRANGE', backlog, '-', '+', 'COUNT', room))
  for _, entry in ipairs(read(room)) do entries[#entries + 1] = entry end
end
return {entries, redis.call('XLEN', backlog)}
