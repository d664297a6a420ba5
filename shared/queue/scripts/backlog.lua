-- Prelude: batch work moves from the backlog, where nobody claims it, to the end of the queue.
-- requests: the beginning of the keys of requests. Of those that Redis has forgotten nothing is moved.
local function move(queue, backlog, requests, entries)
  for _, entry in ipairs(entries) do
    local request = requests .. entry[2][2]
    redis.call('XDEL', backlog, entry[1])
    if redis.call('HGET', request, 'backlog') == entry[1] then
      local moved = redis.call('XADD', queue, '*', unpack(entry[2]))
      redis.call('HSET', request, 'entry', moved, 'backlog', '')
    end
  end
end
