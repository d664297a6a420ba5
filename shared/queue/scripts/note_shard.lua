-- Record until when a shard may have requests, unless a later time is recorded.
-- KEYS: shards    args: name, until (epoch seconds), ttl_ms
local args = cmsgpack.unpack(ARGV[1])
if tonumber(redis.call('HGET', KEYS[1], args.name) or 0) < args['until'] then
  redis.call('HSET', KEYS[1], args.name, string.format('%d', args['until']))
end
redis.call('PEXPIRE', KEYS[1], args.ttl_ms)
return 1
