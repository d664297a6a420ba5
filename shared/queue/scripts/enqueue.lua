-- Accept the choices of a request, all or none: refuse a known id, a full queue and a tenant beyond its limits;
-- store them, add their ids to the queue. Batch work goes to the backlog, which the queue's workers empty.
-- After `places` and `bounds`.
-- KEYS: queue, backlog, places, held, rates of the tenant, then the request of each choice
-- ARGV: nonce, group, timeout_ms, keep_ms, queue_ttl_ms, reply_to, priority, tenant, held (tokens of each choice
--   while it is open), max_depth, max_tokens, and of the tenant max_requests, requests and tokens a minute (0: any),
--   taken (tokens of each choice from the tenant's minute), then of each choice: id, payload
-- Returns {ok | duplicate} or {reason, wait_ms}; wait_ms is 0 where nobody knows. The same nonce again is the same
-- call again: ok.
local queue, backlog, places, held, rates = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local num_choices = #KEYS - 5
for choice = 1, num_choices do
  local nonce = redis.call('HGET', KEYS[5 + choice], 'nonce')
  if nonce then return {nonce == ARGV[1] and 'ok' or 'duplicate'} end
end

local function num_waiting()
  -- Running requests are in the stream too; only those nobody has read yet wait.
  local pending = redis.pcall('XPENDING', queue, ARGV[2])
  return redis.call('XLEN', queue) - (pending.err and 0 or pending[1])
end

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local is_batch, tenant, tokens = ARGV[7] == 'batch', ARGV[8], tonumber(ARGV[9])
local max_depth, depth = tonumber(ARGV[10]), redis.call('XLEN', is_batch and backlog or queue)
if not is_batch and depth + num_choices > max_depth then depth = num_waiting() end
if depth > 0 and depth + num_choices > max_depth then return {'queue_full', 0} end

forget_expired(places, held, now_ms)
local crowd = find_crowd(held, tenant, tokens * num_choices, num_choices, tonumber(ARGV[11]), tonumber(ARGV[12]))
if crowd then return {crowd, 0} end

local rated = {
  {field = 'requests', most = tonumber(ARGV[13]), amount = 1},
  {field = 'tokens', most = tonumber(ARGV[14]), amount = tonumber(ARGV[15]) * num_choices}}
for _, rate in ipairs(rated) do
  local pause_ms = find_pause_ms(rates, rate, now_ms)
  if pause_ms > 0 then return {'key_' .. rate.field, math.ceil(pause_ms)} end
end
for _, rate in ipairs(rated) do spend(rates, rate, now_ms) end

local timeout_ms = tonumber(ARGV[3])
local forgotten_at_ms = string.format('%.0f', now_ms + timeout_ms + ARGV[4])
if is_batch and num_waiting() == 0 then
  redis.call('XADD', queue, '*', 'batch', '')  -- wakes one worker that may have room
end
for choice = 1, num_choices do
  local request, id, payload = KEYS[5 + choice], ARGV[14 + 2 * choice], ARGV[15 + 2 * choice]
  local entry = redis.call('XADD', is_batch and backlog or queue, '*', 'id', id)
  local place = enter(places, held, tokens, tenant, id, forgotten_at_ms)
  redis.call('HSET', request,
    'state', 'queued', 'nonce', ARGV[1], 'attempt', '0', 'failures', '0', 'tokens', '0', 'items', '0',
    'entry', is_batch and '' or entry, 'backlog', is_batch and entry or '', 'place', place,
    'reply_to', ARGV[6], 'payload', payload,
    'enqueued_ms', string.format('%.0f', now_ms),
    'deadline_ms', string.format('%.0f', now_ms + timeout_ms))
  redis.call('PEXPIRE', request, timeout_ms + ARGV[4])
end
-- Places come and go with the requests, the queue stays: its life is renewed when half of it is over.
local first = (is_batch or redis.call('PTTL', queue) < ARGV[5] / 2) and 1 or 3
for key = first, 4 do redis.call('PEXPIRE', KEYS[key], ARGV[5]) end
return {'ok'}
