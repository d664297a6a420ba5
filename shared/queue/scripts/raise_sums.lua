-- Raise the sums of a hash, after Redis was restored from an older copy. Higher sums stay.
-- KEYS: the hash    args: sums (by field); began: absent, or the required value of the empty field (`count_usage.lua`);
--   ttl_ms: absent, or create a missing hash, and set its time to live
local args = cmsgpack.unpack(ARGV[1])
local hash = KEYS[1]
if redis.call('EXISTS', hash) == 0 then
  if not args.ttl_ms then return 0 end
  redis.call('DEL', hash .. ':open') -- reservations of a lost budget, which the new budget does not include
end
if (redis.call('HGET', hash, '') or nil) ~= args.began then return 0 end
for field, sum in pairs(args.sums) do
  if tonumber(redis.call('HGET', hash, field) or -1) < sum then
    redis.call('HSET', hash, field, string.format('%.0f', sum))
  end
end
if args.ttl_ms then redis.call('PEXPIRE', hash, args.ttl_ms) end
return 1
