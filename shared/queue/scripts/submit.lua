-- Accept the choices of a request, all or none: refuse a known id, a full queue and what exceeds a quota; store them,
-- add their ids to the queue. Batch work goes to the backlog, which the queue's workers empty.
-- KEYS: queue, backlog, then the call of each choice, then where there is a quota: reservations, usage, rates
-- args: nonce, group, timeout_ms, keep_ms, queue_ttl_ms, reply_to, is_batch, max_waiting, ids (of the choices), quota:
--   absent, or tenant, num_tokens (of each choice, from the tenant's minute), reserved_tokens (of each choice while it
--   is open), max_tokens, max_tenant_requests, requests_per_minute, tokens_per_minute (0: any)
-- raw: the payload of each choice
-- Returns {ok | duplicate} or {reason, wait_ms}; wait_ms is 0 where nobody knows. The same nonce again is the same
-- call again: ok.
-- reservations: sorted set of "tokens tenant id", by the time (ms) at which Redis forgets the call; 0 once it has ended
-- usage: hash of their sums: tokens, and of each tenant with a reservation tokens:{tenant} and requests:{tenant}
-- rates: hash of two instants (ms), requests and tokens: when all that was taken is earned again. There is at most a
-- minute's worth; where one is left, more may be taken, into debt, which is waited for later.
local queue, backlog = KEYS[1], KEYS[2]
local args = cmsgpack.unpack(ARGV[1])
local ids, is_batch, quota = args.ids, args.is_batch, args.quota
for choice = 1, #ids do
  local nonce = redis.call('HGET', KEYS[2 + choice], 'nonce')
  if nonce then return {nonce == args.nonce and 'ok' or 'duplicate'} end
end

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function digits(number) return string.format('%d', number) end -- cheaper than Redis turns numbers to text
local lives_ms = args.timeout_ms + args.keep_ms
local forgotten_at_ms = digits(now_ms + lives_ms)

local function num_waiting()
  -- Running calls are in the stream too; only those nobody has read yet wait.
  local pending = redis.pcall('XPENDING', queue, args.group)
  return redis.call('XLEN', queue) - (pending.err and 0 or pending[1])
end

local depth = redis.call('XLEN', is_batch and backlog or queue)
if not is_batch and depth + #ids > args.max_waiting then depth = num_waiting() end
if depth > 0 and depth + #ids > args.max_waiting then return {'queue_full', 0} end

-- The quota

local reservations, usage, rates = unpack(KEYS, #ids + 3)
local MINUTE_MS = 60000

local has_ended = false
local sums, changed = {}, {} -- what `usage` comes to, and the fields that it has yet to learn

local function add_usage(tenant, tokens, calls)
  local fields = {'tokens', 'tokens:' .. tenant, 'requests:' .. tenant}
  if not sums[fields[2]] then
    for i, sum in ipairs(redis.call('HMGET', usage, unpack(fields))) do
      sums[fields[i]] = sums[fields[i]] or tonumber(sum) or 0
    end
  end
  for i, amount in ipairs({tokens, tokens, calls}) do
    if amount ~= 0 then
      sums[fields[i]] = math.max(0, sums[fields[i]] + amount)
      changed[fields[i]] = true
    end
  end
end

-- A call counts until it has ended, or Redis has forgotten it. What did so since the last call is taken out here, in
-- one place, so that ending a call needs no sums.
local function release_ended()
  local ended = redis.call('ZRANGEBYSCORE', reservations, '-inf', digits(now_ms))
  has_ended = #ended > 0
  local tokens_of, calls_of = {}, {}
  for _, reservation in ipairs(ended) do
    local tokens, tenant = string.match(reservation, '^(%d+) (%S*) ')
    tokens_of[tenant] = (tokens_of[tenant] or 0) + tokens
    calls_of[tenant] = (calls_of[tenant] or 0) + 1
  end
  for tenant, tokens in pairs(tokens_of) do add_usage(tenant, -tokens, -calls_of[tenant]) end
end

local function call_with_each(command, values)
  for i = 1, #values, 1000 do redis.call(command, usage, unpack(values, i, math.min(i + 999, #values))) end
end

local function save_usage()
  if not next(changed) then return end
  local kept, gone = {'tokens', digits(sums.tokens)}, {}
  for field in pairs(changed) do
    if sums[field] == 0 then
      gone[#gone + 1] = field
    elseif field ~= 'tokens' then
      kept[#kept + 1], kept[#kept + 2] = field, digits(sums[field])
    end
  end
  -- The first write of the call: where memory is full it is refused, as the others would not be, and with it the call.
  call_with_each('HSET', kept)
  call_with_each('HDEL', gone)
  changed = {}
end

-- Whether so many tokens more are too many: of all, or of a tenant once half of all are reserved.
local function find_excess(tokens, calls)
  add_usage(quota.tenant, 0, 0)
  local all, own, open = sums.tokens, sums['tokens:' .. quota.tenant], sums['requests:' .. quota.tenant]
  local max_tokens, max_calls = quota.max_tokens, quota.max_tenant_requests
  if max_tokens > 0 and all > 0 and all + tokens > max_tokens then return 'open_tokens' end
  if max_calls > 0 and open > 0 and open + calls > max_calls then return 'key_open' end
  if max_tokens > 0 and own > 0 and all + tokens > max_tokens / 2 then
    save_usage()
    local num_tenants = (redis.call('HLEN', usage) - 1) / 2
    if own + tokens > max_tokens / num_tenants then return 'key_share' end
  end
  return nil
end

local function owed_ms(rate)
  return math.max(0, tonumber(redis.call('HGET', rates, rate.field) or 0) - now_ms)
end

-- How long until something may be taken; 0 is now.
local function find_pause_ms(rate)
  if rate.most == 0 then return 0 end
  return owed_ms(rate) - (MINUTE_MS - MINUTE_MS / rate.most)
end

local function spend(rate)
  if rate.most == 0 then return end
  local until_ms = now_ms + math.max(0, owed_ms(rate) + rate.amount * MINUTE_MS / rate.most)
  redis.call('HSET', rates, rate.field, string.format('%.3f', until_ms))
  if redis.call('PTTL', rates) < until_ms - now_ms then
    redis.call('PEXPIRE', rates, math.ceil(until_ms - now_ms))
  end
end

local function find_refusal()
  release_ended()
  local excess = find_excess(quota.reserved_tokens * #ids, #ids)
  if excess then return {excess, 0} end
  local rated = {
    {field = 'requests', most = quota.requests_per_minute, amount = 1},
    {field = 'tokens', most = quota.tokens_per_minute, amount = quota.num_tokens * #ids}}
  for _, rate in ipairs(rated) do
    local pause_ms = find_pause_ms(rate)
    if pause_ms > 0 then return {'key_' .. rate.field, math.ceil(pause_ms)} end
  end
  for _, rate in ipairs(rated) do spend(rate) end
  return nil
end

local reservation_of = {}
if quota then
  local refusal = find_refusal()
  if not refusal then add_usage(quota.tenant, quota.reserved_tokens * #ids, #ids) end
  save_usage()
  local beginning = string.format('%d %s ', quota.reserved_tokens, quota.tenant)
  for _, id in ipairs(refusal and {} or ids) do
    reservation_of[id] = beginning .. id
    redis.call('ZADD', reservations, forgotten_at_ms, reservation_of[id])
  end
  if has_ended then redis.call('ZREMRANGEBYSCORE', reservations, '-inf', digits(now_ms)) end
  if refusal then return refusal end
  if redis.call('PTTL', reservations) < args.queue_ttl_ms / 2 then
    redis.call('PEXPIRE', reservations, digits(args.queue_ttl_ms))
    redis.call('PEXPIRE', usage, digits(args.queue_ttl_ms))
  end
end

-- The queue

if is_batch and num_waiting() == 0 then
  redis.call('XADD', queue, '*', 'batch', '')  -- wakes one worker that may have room
end
for i, id in ipairs(ids) do
  local request = KEYS[2 + i]
  local entry = redis.call('XADD', is_batch and backlog or queue, '*', 'id', id)
  redis.call('HSET', request,
    'state', 'queued', 'nonce', args.nonce, 'attempt', '0', 'failures', '0', 'tokens', '0', 'items', '0',
    'entry', is_batch and '' or entry, 'backlog', is_batch and entry or '',
    'reservation', reservation_of[id] or '',
    'reply_to', args.reply_to, 'payload', ARGV[1 + i],
    'enqueued_ms', digits(now_ms), 'deadline_ms', digits(now_ms + args.timeout_ms))
  redis.call('PEXPIRE', request, digits(lives_ms))
end
-- The queue's life is renewed when half of it is over.
if is_batch or redis.call('PTTL', queue) < args.queue_ttl_ms / 2 then
  redis.call('PEXPIRE', queue, args.queue_ttl_ms)
  redis.call('PEXPIRE', backlog, args.queue_ttl_ms)
end
return {'ok'}
