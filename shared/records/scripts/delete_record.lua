-- Drop a record.
-- KEYS: records, sizes (`put_record.lua`)    args: prefix, name
-- Returns the record, if it was there.
local args = cmsgpack.unpack(ARGV[1])
local records, sizes = KEYS[1], KEYS[2]
local record = redis.call('GET', args.prefix .. args.name)
if not record then return false end
redis.call('DEL', args.prefix .. args.name)
redis.call('ZREM', records, args.name)
redis.call('HINCRBY', sizes, '', -(redis.call('HGET', sizes, args.name) or 0))
redis.call('HDEL', sizes, args.name)
return record
