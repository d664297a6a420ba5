-- Raise the sums of a hash, after Redis was restored from an older copy. Higher sums stay.
-- KEYS: the hash    args: sums (by field); began: absent, or the empty field of the hash, which tells days apart
--   (`count_usage.lua`); ttl_ms: absent, or create the hash if there is none, and renew its time to live
local args = cmsgpack.unpack(ARGV[1])
local hash = KEYS[1]
if redis.call('EXISTS', hash) == 0 then
  if not args.ttl_ms then return 0 end
  redis.call('DEL', hash .. ':open') -- reservations of a budget that Redis lost: the new one lacks them
end
if (redis.call('HGET', hash, '') or nil) ~= args.began then return 0 end
for field, sum in pairs(args.sums) do
  if tonumber(redis.call('HGET', hash, field) or -1) < sum then
    redis.call('HSET', hash, field, string.format('%.0f', sum))
  end
end
if args.ttl_ms then redis.call('PEXPIRE', hash, args.ttl_ms) end
return 1
