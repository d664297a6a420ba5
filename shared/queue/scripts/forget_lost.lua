-- Drop from the front of the backlog what Redis has forgotten: nobody came for it in time, and it counts as waiting.
-- KEYS: backlog, the beginning of the keys of requests    ARGV: count
-- Returns how many were dropped.
local dropped = 0
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', ARGV[1])) do
  if redis.call('HGET', KEYS[2] .. entry[2][2], 'backlog') == entry[1] then break end  -- later ones live longer
  dropped = dropped + redis.call('XDEL', KEYS[1], entry[1])
end
return dropped
