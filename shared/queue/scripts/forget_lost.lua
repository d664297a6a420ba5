-- Drop expired entries from the front of the backlog: their requests are deleted, but the entries still count as waiting.
-- KEYS: backlog    args: requests (prefix of the keys of calls), count
-- Returns the number of dropped entries.
local args = cmsgpack.unpack(ARGV[1])
local dropped = 0
for _, entry in ipairs(redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', args.count)) do
  if redis.call('HGET', args.requests .. entry[2][2], 'backlog') == entry[1] then break end  -- later entries expire later
  dropped = dropped + redis.call('XDEL', KEYS[1], entry[1])
end
return dropped
