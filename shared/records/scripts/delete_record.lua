-- Delete a record.
-- KEYS: records, sizes, reply (`put_record.lua`)    args: prefix, name, reply_ms
-- Returns the record, if it existed.
local args = cmsgpack.unpack(ARGV[1])
local records, sizes = KEYS[1], KEYS[2]
local record = redis.call('GET', args.prefix .. args.name)
if not record then return redis.call('GET', KEYS[3]) end
redis.call('DEL', args.prefix .. args.name)
redis.call('ZREM', records, args.name)
redis.call('HINCRBY', sizes, '', -(redis.call('HGET', sizes, args.name) or 0))
redis.call('HDEL', sizes, args.name)
redis.call('SET', KEYS[3], record, 'PX', args.reply_ms)
return record
