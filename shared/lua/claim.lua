-- Give a request to a worker under the next attempt number, which fences all earlier ones.
-- KEYS: queue, request, log
-- ARGV: entry, group, worker, nonce, max_attempts
-- Returns {verdict, attempt, failures, payload, reply_to, log, waited_ms, remaining_ms} where the verdict is
--   ok | expired (deadline passed) | exhausted (too many workers died of it),
-- or {stray}: no such live request belongs to this entry, which is removed.
-- An attempt that neither finished nor was given back counts as a failure of the request, if it has begun: the
-- first begins at once, later ones by the script `begin`, so that nobody is blamed who only waited to run alone.
local queue, request, log = KEYS[1], KEYS[2], KEYS[3]
local r = redis.call('HMGET', request, 'state', 'attempt', 'failures', 'claim', 'entry',
  'deadline_ms', 'enqueued_ms', 'payload', 'reply_to', 'begun')
local state, attempt, failures = r[1], r[2], r[3]
if (state ~= 'queued' and state ~= 'running') or r[5] ~= ARGV[1] then
  redis.call('XACK', queue, ARGV[2], ARGV[1])
  redis.call('XDEL', queue, ARGV[1])
  return {'stray'}
end

if r[4] ~= ARGV[4] then -- else: the same call again, whose reply was lost
  attempt = string.format('%d', attempt + 1)
  if state == 'running' and r[10] == '1' then failures = string.format('%d', failures + 1) end
  redis.call('HSET', request, 'state', 'running', 'attempt', attempt, 'failures', failures,
    'claim', ARGV[4], 'worker', ARGV[3], 'items', '0', 'begun', failures == '0' and '1' or '0')
end

local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local remaining_ms = tonumber(r[6]) - now_ms
local verdict = 'ok'
if remaining_ms <= 0 then
  verdict = 'expired'
elseif tonumber(failures) >= tonumber(ARGV[5]) then
  verdict = 'exhausted'
end
return {verdict, tonumber(attempt), tonumber(failures), r[8], r[9],
  redis.call('LRANGE', log, 0, -1), now_ms - tonumber(r[7]), remaining_ms}
