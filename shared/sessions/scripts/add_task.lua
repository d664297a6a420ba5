-- Add a task to a session before it is queued, and renew the session.
-- KEYS: session, tasks, open, order    args: id, at (its creation, in seconds), max_tasks, ttl_ms    raw: the task's record
-- Returns {added | known | closed | full | gone, the known record}.
local session, tasks, open, order = unpack(KEYS)
local args = cmsgpack.unpack(ARGV[1])
local state = redis.call('HGET', session, 'state')
if not state then return {'gone', ''} end
for _, key in ipairs(KEYS) do
  if redis.call('PTTL', key) < args.ttl_ms then redis.call('PEXPIRE', key, args.ttl_ms) end
end
local known = redis.call('HGET', tasks, args.id)
if known then return {'known', known} end
if state ~= 'open' then return {'closed', ''} end
if redis.call('HLEN', tasks) >= args.max_tasks then return {'full', ''} end
redis.call('HSET', tasks, args.id, 'open ' .. ARGV[2])
redis.call('HSET', open, args.id, ARGV[2])
redis.call('ZADD', order, string.format('%.6f', args.at), args.id)
for _, key in ipairs({tasks, open, order}) do redis.call('PEXPIRE', key, args.ttl_ms) end
return {'added', ''}
