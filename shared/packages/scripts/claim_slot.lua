-- Claim the first unclaimed slot of args.ids. The claim expires, unless the node reports the slot in its record before.
-- KEYS: claims    args: ids, node, lease_ms, ttl_ms
-- Returns the position of the claimed slot among the ids, from 1; 0 if no slot is free.
local args = cmsgpack.unpack(ARGV[1])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for place, id in ipairs(args.ids) do
  local claim = redis.call('HGET', KEYS[1], id)
  if not claim or now - tonumber(string.match(claim, '^%d+')) > args.lease_ms then
    redis.call('HSET', KEYS[1], id, string.format('%.0f %s', now, args.node))
    redis.call('PEXPIRE', KEYS[1], args.ttl_ms)
    return place
  end
end
return 0
