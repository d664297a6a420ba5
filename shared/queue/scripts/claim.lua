-- Claim requests for a worker, each under its next attempt number, which fences all earlier attempts.
-- KEYS: queue, then request and log of one request to claim; with only the queue: claim all of the worker's last read
-- args: entry, group, worker, nonce, max_attempts, max_losses, cleared_after, affinity_ms (time to live of a preferred
--   worker), wakeups (prefix of the keys of streams, `wake.lua`); for one: read_nonce (nonce of this worker's reads);
--   for all: count, requests and logs (prefixes of their keys), and `entry` is the last entry before this read
-- Returns for one {verdict, attempt, failures, payload, reply_to, waited_ms, remaining_ms, piece of the log...}. Verdicts:
--   ok | expired (deadline passed) | kills_workers (max_attempts crashes) | exhausted (max_losses lost workers),
-- or {unknown}: the entry has no live request, and is removed.
-- Returns for all a list of entry, id, length of the reply, reply..., without entries that are already claimed. It is a
-- flat list, because Redis before version 7 sends each nested table of a reply in a separate write.
-- Poison detection: `failures` is the crash count. It counts attempts that began, were lost, and were not released. The
-- first loss always counts; further losses count only within `cleared_after` new tokens, while the request runs alone.
-- An attempt begins with its claim or, if the crash count is above 0, with `begin.lua` after a wait to run alone. A read
-- whose reply was lost does not count: it has this worker's read nonce, and nothing was published.
local args = cmsgpack.unpack(ARGV[1])
local queue, group, worker, nonce = KEYS[1], args.group, args.worker, args.nonce
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function claim(entry, request, log, is_new, read_nonce)
  local r = redis.call('HMGET', request, 'state', 'attempt', 'failures', 'claim', 'entry',
    'deadline_ms', 'enqueued_ms', 'payload', 'reply_to', 'home', 'earlier')
  local state, attempt, failures, is_first = r[1], r[2], r[3], r[2] == '0'
  if (state ~= 'queued' and state ~= 'running') or r[5] ~= entry then
    redis.call('XACK', queue, group, entry)
    redis.call('XDEL', queue, entry)
    return {'unknown'}
  end
  if is_new and attempt ~= '0' then return nil end

  local losses = 0
  if is_first and r[4] ~= nonce then
    attempt = '1' -- the other fields are those of `submit`
    redis.call('HSET', request, 'state', 'running', 'attempt', '1', 'claim', nonce, 'worker', worker, 'begun', '1')
    if r[11] then redis.call('HSET', request, 'claimed_tokens', redis.call('HGET', request, 'tokens')) end
  elseif not is_first then
    local begun, items, tokens, claimed, lost, last_worker =
      unpack(redis.call('HMGET', request, 'begun', 'items', 'tokens', 'claimed_tokens', 'losses', 'worker'))
    losses = tonumber(lost or 0)
    if r[4] ~= nonce then -- else: a repeated call
      if state == 'running' then wake(args.wakeups .. last_worker, 'lost', entry) end
      local was_lost = r[4] == read_nonce and items == '0'
      attempt = string.format('%d', attempt + 1)
      if state == 'running' and begun == '1' and not was_lost then
        losses = losses + 1
        local is_cleared = failures ~= '0' and tokens - (claimed or 0) >= args.cleared_after
        if not is_cleared then failures = string.format('%d', failures + 1) end
      end
      redis.call('HSET', request, 'state', 'running', 'attempt', attempt, 'failures', failures,
        'claim', nonce, 'worker', worker, 'items', '0', 'claimed_tokens', tokens, 'losses', string.format('%d', losses),
        'begun', failures == '0' and '1' or '0')
    end
  end
  if r[10] and r[4] ~= nonce then redis.call('SET', r[10], worker, 'PX', args.affinity_ms) end

  local remaining_ms = tonumber(r[6]) - now_ms
  local verdict = 'ok'
  if remaining_ms <= 0 then
    verdict = 'expired'
  elseif tonumber(failures) >= args.max_attempts then
    verdict = failures == '1' and 'exhausted' or 'kills_workers'
  elseif losses >= args.max_losses then
    verdict = 'exhausted'
  end
  local answer = {verdict, tonumber(attempt), tonumber(failures), r[8], r[9], now_ms - tonumber(r[7]), remaining_ms}
  if r[11] then answer[#answer + 1] = r[11] end
  if not is_first then
    for _, piece in ipairs(redis.call('LRANGE', log, 0, -1)) do answer[#answer + 1] = piece end
  end
  return answer
end

local function claim_new(after, count, requests, logs)
  local answers = {}
  -- `mine` includes the requests that are reserved for this worker, which may already run.
  local mine = redis.pcall('XPENDING', queue, group, '(' .. after, '+', count + 100, worker)
  if mine.err or #mine == 0 then return answers end
  -- Most entries are adjacent. An entry of another worker, or a deleted entry, shifts the entries after it.
  local entries = redis.call('XRANGE', queue, mine[1][1], mine[#mine][1], 'COUNT', #mine)
  for place, pending in ipairs(mine) do
    local entry = entries[place]
    if not entry or entry[1] ~= pending[1] then
      entry = redis.call('XRANGE', queue, pending[1], pending[1])[1]
    end
    if entry and entry[2][1] == 'id' then
      local answer = claim(pending[1], requests .. entry[2][2], logs .. entry[2][2], true)
      if answer then
        answers[#answers + 1] = pending[1]
        answers[#answers + 1] = entry[2][2]
        answers[#answers + 1] = #answer
        for _, part in ipairs(answer) do answers[#answers + 1] = part end
      end
    end
  end
  return answers
end

if #KEYS == 1 then return claim_new(args.entry, args.count, args.requests, args.logs) end
return claim(args.entry, KEYS[2], KEYS[3], false, args.read_nonce)
