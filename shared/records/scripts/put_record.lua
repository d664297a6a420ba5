-- Store a record of an owner. Expired records, then the oldest, are deleted to stay within the limits.
-- KEYS: records (names by expiry in ms), sizes (bytes by name, and the sum under ''), reply (for a retry of the call)
-- args: prefix (of the keys of records), name, ttl_ms, size, max_bytes, max_records, anew, reply_ms    raw: the record
-- Returns the deleted names and records, alternating. Without `anew`, an existing record stays.
local args = cmsgpack.unpack(ARGV[1])
local records, sizes = KEYS[1], KEYS[2]
local reply = redis.call('GET', KEYS[3])
if reply then return cmsgpack.unpack(reply) end
if redis.call('EXISTS', args.prefix .. args.name) == 1 and not args.anew then return {} end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local made_room = {}

local function forget(name)
  redis.call('ZREM', records, name)
  redis.call('HINCRBY', sizes, '', -(redis.call('HGET', sizes, name) or 0))
  redis.call('HDEL', sizes, name)
  local record = redis.call('GET', args.prefix .. name)
  if record then
    redis.call('DEL', args.prefix .. name)
    made_room[#made_room + 1] = name
    made_room[#made_room + 1] = record
  end
end

if redis.call('DEL', args.prefix .. args.name) == 1 then forget(args.name) end
for _, name in ipairs(redis.call('ZRANGEBYSCORE', records, '-inf', string.format('%.0f', now_ms))) do forget(name) end
while true do
  local oldest = redis.call('ZRANGE', records, 0, 0)[1]
  local num_bytes = tonumber(redis.call('HGET', sizes, '') or 0)
  local is_full = redis.call('ZCARD', records) >= args.max_records or num_bytes + args.size > args.max_bytes
  if not oldest or not is_full then break end
  forget(oldest)
end
redis.call('SET', args.prefix .. args.name, ARGV[2], 'PX', args.ttl_ms)
redis.call('ZADD', records, string.format('%.0f', now_ms + args.ttl_ms), args.name)
redis.call('HSET', sizes, args.name, args.size)
redis.call('HINCRBY', sizes, '', args.size)
redis.call('PEXPIRE', records, args.ttl_ms)
redis.call('PEXPIRE', sizes, args.ttl_ms)
if #made_room > 0 then redis.call('SET', KEYS[3], cmsgpack.pack(made_room), 'PX', args.reply_ms) end
return made_room
