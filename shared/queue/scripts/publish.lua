-- Append the events of many requests to their logs and post those accepted as one entry for each gateway. After `post`.
-- KEYS: mailbox, then request and log of each item
-- ARGV: max_entries, then of each item: attempt, number, index, count, events
--   number: the how-maniest item of this attempt, so that a repeated call changes nothing
--   index, count: the first output token of the item and how many there are
--   events: JSON objects, comma separated
-- Returns for each item ok | gone | cancelled | ended | fenced | gap.
local verdicts = {}
for item = 1, (#KEYS - 1) / 2 do
  local request, log = KEYS[2 * item], KEYS[2 * item + 1]
  local a = 5 * item - 3
  local r = redis.call('HMGET', request, 'state', 'attempt', 'tokens', 'items', 'listeners')
  local verdict = 'ok'
  if not r[1] then
    verdict = 'gone'
  elseif r[1] == 'cancelled' then
    verdict = 'cancelled'
  elseif r[2] ~= ARGV[a] then
    verdict = 'fenced'
  elseif r[1] ~= 'running' then
    verdict = r[1] == 'queued' and 'fenced' or 'ended'
  elseif tonumber(ARGV[a + 1]) > tonumber(r[4]) then
    if r[3] ~= ARGV[a + 2] then
      verdict = 'gap'
    else
      redis.call('HSET', request, 'items', ARGV[a + 1],
        'tokens', string.format('%d', r[3] + ARGV[a + 3]))
      if redis.call('RPUSH', log, ARGV[a + 4]) == 1 then
        redis.call('PEXPIRE', log, redis.call('PTTL', request))
      end
      post(KEYS[1], r[5], ARGV[a + 4])
    end
  end
  verdicts[item] = verdict
end
send_posts(ARGV[1])
return verdicts
