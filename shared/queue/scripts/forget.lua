-- Delete a call that has ended; with failed_only, only a call that has failed.
-- KEYS: call, log    args: failed_only
-- Returns 1 if no call has this id now, else 0.
local args = cmsgpack.unpack(ARGV[1])
local state = redis.call('HGET', KEYS[1], 'state')
if state == 'queued' or state == 'running' then return 0 end
if args.failed_only and state and state ~= 'failed' then return 0 end
redis.call('DEL', KEYS[1], KEYS[2])
return 1
