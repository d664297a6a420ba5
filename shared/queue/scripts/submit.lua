-- Submit the choices of a request, all or none: refuse a known id, a full queue and a request beyond a quota; store the
-- choices, and add their ids to the queue, or to the backlog if the request is a batch request.
-- KEYS: queue, backlog, then the call of each choice, then if there is a quota: reservations, usage, rates
-- args: nonce, group, tenant, timeout_ms, keep_ms, queue_ttl_ms, reply_to, is_batch, max_waiting, ids (of the choices);
--   quota: absent, or tenant, num_tokens (of each choice, charged to the tokens per minute), reserved_tokens (of each
--   choice while it is open), max_tokens, max_tenant_requests, requests_per_minute, tokens_per_minute (0: unlimited);
--   affinity: absent, or key, wakeups (prefix of the keys of their streams), num_workers, num_seats
--   charges: absent, or the charge of each choice (`count_usage.lua`); budget: absent, or key, most, reserved (of each choice), ttl_ms
--   num_earlier: absent, or the number of tokens that the only choice has published before Redis lost it
-- raw: the payload of each choice, then with num_earlier: the event with these tokens
-- Returns {duplicate}, {no_budget} if the budget does not exist, {reason, wait_ms} or {ok}; with an affinity {ok, home | new | busy | gone}. wait_ms is 0 if unknown.
-- With limits per minute, {ok, affinity or '', ms until the bucket of requests is full, ms until the bucket of tokens is full}.
-- A call with the same nonce is a repeated call: ok.
-- reservations: sorted set; member: "tokens tenant id", score: expiry of the call (ms), or 0 once it has ended
-- usage: hash of their sums: tokens of all tenants; tokens:{tenant} and requests:{tenant} of tenants with reservations
-- budget: hash of nano-dollars: spent, reserved. Key with the suffix `:open`: sorted set; member: "reserved call", score:
--   expiry of the call (ms). The last request may overdraw the budget once.
-- rates: hash of token buckets (GCRA): requests, tokens -> theoretical arrival time (ms). A bucket holds a minute's
--   worth; the last request may overdraw the bucket once.
local NO_CHARGE = '0 0 0 0 0 0 '
local queue, backlog = KEYS[1], KEYS[2]
local args = cmsgpack.unpack(ARGV[1])
local ids, is_batch, quota = args.ids, args.is_batch, args.quota
for choice = 1, #ids do
  local nonce = redis.call('HGET', KEYS[2 + choice], 'nonce')
  if nonce and nonce ~= args.nonce then return {'duplicate'} end
  if nonce and not args.affinity then return {'ok'} end
  if nonce then return {'ok', redis.call('HGET', KEYS[2 + choice], 'aside') and 'home' or 'busy'} end
end

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function digits(number) return string.format('%d', number) end -- cheaper than Redis's own conversion
local lives_ms = args.timeout_ms + args.keep_ms
local forgotten_at_ms = digits(now_ms + lives_ms)

local function num_waiting()
  -- Running calls are in the stream too; only calls that no worker has read are waiting.
  local pending = redis.pcall('XPENDING', queue, args.group)
  return redis.call('XLEN', queue) - (pending.err and 0 or pending[1])
end

local depth = redis.call('XLEN', is_batch and backlog or queue)
local num_there = depth
if not is_batch and depth + #ids > args.max_waiting then depth = num_waiting() end
if depth > 0 and depth + #ids > args.max_waiting then return {'queue_full', 0} end

-- The budget

local budget = args.budget
if budget then
  local sums = redis.call('HMGET', budget.key, 'spent', 'reserved')
  if not sums[1] then return {'no_budget'} end
  local open, reserved = budget.key .. ':open', sums[2] or 0
  local expired = redis.call('ZRANGEBYSCORE', open, '-inf', digits(now_ms))
  for _, member in ipairs(expired) do
    reserved = redis.call('HINCRBY', budget.key, 'reserved', '-' .. string.match(member, '^%d+'))
  end
  if #expired > 0 then redis.call('ZREMRANGEBYSCORE', open, '-inf', digits(now_ms)) end
  if sums[1] + reserved >= budget.most then return {'key_budget', 0} end
end

-- The quota

local reservations, usage, rates = unpack(KEYS, #ids + 3)
local MINUTE_MS = 60000

local function debt_ms(rate)
  return math.max(0, tonumber(redis.call('HGET', rates, rate.field) or 0) - now_ms)
end

-- Time until a request is allowed; 0 or less: it is allowed now.
local function find_pause_ms(rate)
  if rate.most == 0 then return 0 end
  return debt_ms(rate) - (MINUTE_MS - MINUTE_MS / rate.most)
end

local function spend(rate)
  if rate.most == 0 then return 0 end
  local until_ms = now_ms + math.max(0, debt_ms(rate) + rate.amount * MINUTE_MS / rate.most)
  redis.call('HSET', rates, rate.field, string.format('%.3f', until_ms))
  if redis.call('PTTL', rates) < until_ms - now_ms then
    redis.call('PEXPIRE', rates, math.ceil(until_ms - now_ms))
  end
  return math.ceil(until_ms - now_ms)
end

local debts -- ms until each bucket is full again

-- Refusal by a token bucket, or nil after both are charged.
local function find_debt()
  local rated = {
    {field = 'requests', most = quota.requests_per_minute, amount = 1},
    {field = 'tokens', most = quota.tokens_per_minute, amount = quota.num_tokens * #ids}}
  for _, rate in ipairs(rated) do
    local pause_ms = find_pause_ms(rate)
    if pause_ms > 0 then return {'key_' .. rate.field, math.ceil(pause_ms)} end
  end
  debts = {spend(rated[1]), spend(rated[2])}
  return nil
end

local beginning -- start of a reservation, before the call's id
if quota then
  beginning = digits(quota.reserved_tokens) .. ' ' .. quota.tenant .. ' '
  local own_tokens, own_calls = 'tokens:' .. quota.tenant, 'requests:' .. quota.tenant
  local sums = redis.call('HMGET', usage, 'tokens', own_tokens, own_calls)
  local all, own, open = tonumber(sums[1] or 0), tonumber(sums[2] or 0), tonumber(sums[3] or 0)

  -- A call counts until its end or its expiry. Calls that ended since the last submit are subtracted only here, so that
  -- ending a call does not update the sums.
  local ended = redis.call('ZRANGEBYSCORE', reservations, '-inf', digits(now_ms))
  local others = {} -- subtracted from the sums of other tenants, by field
  for _, reservation in ipairs(ended) do
    local tokens, tenant = string.match(reservation, '^(%d+) (%S*) ')
    all = all - tokens
    if tenant == quota.tenant then
      own, open = own - tokens, open - 1
    else
      others['tokens:' .. tenant] = (others['tokens:' .. tenant] or 0) + tokens
      others['requests:' .. tenant] = (others['requests:' .. tenant] or 0) + 1
    end
  end
  all, own, open = math.max(0, all), math.max(0, own), math.max(0, open)

  local function save()
    -- The first write: if memory is full, Redis refuses it and with it the whole script.
    redis.call('HSET', usage, 'tokens', digits(all), own_tokens, digits(own), own_calls, digits(open))
    if own == 0 then redis.call('HDEL', usage, own_tokens) end
    if open == 0 then redis.call('HDEL', usage, own_calls) end
    for field, amount in pairs(others) do
      local left = tonumber(redis.call('HGET', usage, field) or 0) - amount
      if left > 0 then redis.call('HSET', usage, field, digits(left)) else redis.call('HDEL', usage, field) end
    end
    others = {}
    if #ended > 0 then redis.call('ZREMRANGEBYSCORE', reservations, '-inf', digits(now_ms)) end
  end

  -- Refusal if `tokens` more tokens exceed `max_tokens` of all tenants or, once half of that is reserved, the tenant's
  -- equal share, or if the calls exceed `max_calls` of the tenant.
  local function find_excess(tokens, max_tokens, max_calls)
    if max_tokens > 0 and all > 0 and all + tokens > max_tokens then return {'open_tokens', 0} end
    if max_calls > 0 and open > 0 and open + #ids > max_calls then return {'key_open', 0} end
    if max_tokens > 0 and own > 0 and all + tokens > max_tokens / 2 then
      save()
      local num_tenants = (redis.call('HLEN', usage) - 1) / 2
      if own + tokens > max_tokens / num_tenants then return {'key_share', 0} end
    end
    return nil
  end

  local tokens = quota.reserved_tokens * #ids
  local refusal = find_excess(tokens, quota.max_tokens, quota.max_tenant_requests)
  if not refusal and quota.requests_per_minute + quota.tokens_per_minute > 0 then refusal = find_debt() end
  if refusal then
    if #ended > 0 then save() end
    return refusal
  end
  all, own, open = all + tokens, own + tokens, open + #ids
  save()
  for _, id in ipairs(ids) do redis.call('ZADD', reservations, forgotten_at_ms, beginning .. id) end
  if redis.call('PTTL', reservations) < args.queue_ttl_ms / 2 then
    redis.call('PEXPIRE', reservations, digits(args.queue_ttl_ms))
    redis.call('PEXPIRE', usage, digits(args.queue_ttl_ms))
  end
end

-- Prefix affinity: the calls are reserved for the worker that last served their affinity key, unless other requests wait
-- or the worker holds more than twice its share of the running calls.

local MORE_THAN_SHARE = 2  -- calls in addition to twice the share
local affinity, preferred, outcome = args.affinity, nil, nil

local function find_preferred()
  local worker = redis.call('GET', affinity.key)
  if not worker then return nil, 'new' end
  local pending = redis.pcall('XPENDING', queue, args.group)
  if pending.err or num_there > pending[1] then return nil, 'busy' end
  local num_held, num_all = #ids, pending[1] + #ids
  for _, consumer in ipairs(pending[4] or {}) do
    if consumer[1] == worker then num_held = num_held + consumer[2] end
  end
  local most = math.min(affinity.num_seats, 2 * num_all / affinity.num_workers + MORE_THAN_SHARE)
  if num_held > most then return nil, 'busy' end
  if not wake(affinity.wakeups .. worker, 'id', ids[1]) then return nil, 'gone' end
  return worker, 'home'
end

if affinity then preferred, outcome = find_preferred() end

-- The queue

if is_batch and num_waiting() == 0 then
  redis.call('XADD', queue, '*', 'batch', '')  -- wakes one worker
end
local reserved = {}
for i, id in ipairs(ids) do
  local request = KEYS[2 + i]
  if budget then
    redis.call('HINCRBY', budget.key, 'reserved', digits(budget.reserved))
    redis.call('ZADD', budget.key .. ':open', forgotten_at_ms, digits(budget.reserved) .. ' ' .. request)
  end
  local entry = redis.call('XADD', is_batch and backlog or queue, '*', 'id', id)
  if preferred then reserved[i] = entry end
  local others = preferred and {'aside', entry, 'aside_home', affinity.key} or affinity and {'home', affinity.key} or {}
  local charge = args.charges and args.charges[i] or i > 1 and '+' .. NO_CHARGE
  if charge then others[#others + 1], others[#others + 2] = 'charge', charge end
  redis.call('HSET', request,
    'state', 'queued', 'nonce', args.nonce, 'attempt', '0', 'failures', '0', 'tokens', '0', 'items', '0',
    'entry', is_batch and '' or entry, 'backlog', is_batch and entry or '',
    'reservation', beginning and beginning .. id or '',
    'reply_to', args.reply_to, 'tenant', args.tenant, 'payload', ARGV[1 + i],
    'enqueued_ms', digits(now_ms), 'deadline_ms', digits(now_ms + args.timeout_ms), unpack(others))
  redis.call('PEXPIRE', request, digits(lives_ms))
end
if args.num_earlier then
  redis.call('HSET', KEYS[3], 'tokens', args.num_earlier, 'earlier', ARGV[#ARGV])
end
if preferred then -- mark the entries as read by this worker
  local last = reserved[#reserved]
  for _, option in ipairs({'FORCE', 'JUSTID', 'LASTID', last}) do reserved[#reserved + 1] = option end
  redis.call('XCLAIM', queue, args.group, preferred, 0, unpack(reserved))
end
if budget then
  redis.call('PEXPIRE', budget.key, digits(budget.ttl_ms))
  redis.call('PEXPIRE', budget.key .. ':open', digits(budget.ttl_ms))
end
-- Renew the time to live when half of it is over.
if is_batch or redis.call('PTTL', queue) < args.queue_ttl_ms / 2 then
  redis.call('PEXPIRE', queue, args.queue_ttl_ms)
  redis.call('PEXPIRE', backlog, args.queue_ttl_ms)
end
if debts then return {'ok', outcome or '', debts[1], debts[2]} end
return {'ok', outcome}
