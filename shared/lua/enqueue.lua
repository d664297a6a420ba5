-- Accept a request once: refuse a known id and a full queue, store it, add its id to the queue.
-- KEYS: queue, request
-- ARGV: id, nonce, max_depth, timeout_ms, keep_ms, queue_ttl_ms, group, reply_to, payload
-- Returns ok | duplicate | full. The same nonce again is the same call again: ok.
local queue, request = KEYS[1], KEYS[2]
local known = redis.call('HGET', request, 'nonce')
if known then
  return known == ARGV[2] and 'ok' or 'duplicate'
end

local max_depth = tonumber(ARGV[3])
local depth = redis.call('XLEN', queue)
if depth >= max_depth then
  -- Running requests are in the stream too; only those nobody has read yet wait.
  local pending = redis.pcall('XPENDING', queue, ARGV[7])
  if not pending.err then depth = depth - pending[1] end
  if depth >= max_depth then return 'full' end
end

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local timeout_ms = tonumber(ARGV[4])
local entry = redis.call('XADD', queue, '*', 'id', ARGV[1])
redis.call('HSET', request,
  'state', 'queued', 'nonce', ARGV[2], 'attempt', '0', 'failures', '0', 'tokens', '0', 'items', '0',
  'entry', entry, 'reply_to', ARGV[8], 'payload', ARGV[9],
  'enqueued_ms', string.format('%.0f', now_ms),
  'deadline_ms', string.format('%.0f', now_ms + timeout_ms))
redis.call('PEXPIRE', request, timeout_ms + tonumber(ARGV[5]))
redis.call('PEXPIRE', queue, ARGV[6])
return 'ok'
