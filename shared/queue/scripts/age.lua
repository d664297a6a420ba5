-- Batch work is not passed for ever: the oldest joins the queue once it has waited long enough.
-- KEYS: queue, backlog    args: requests (the beginning of the keys of calls), age_ms
-- Returns how many batch calls are left.
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

local time = redis.call('TIME')
local before_ms = time[1] * 1000 + math.floor(time[2] / 1000) - args.age_ms
move(redis.call('XRANGE', backlog, '-', string.format('%.0f', before_ms), 'COUNT', 1))
return redis.call('XLEN', backlog)
