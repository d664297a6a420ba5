-- Prepended to the scripts that add to a worker's stream of wakeups.
-- Fields: `id`: a request that is reserved for the worker; `lost`: an entry that no longer belongs to the worker.
-- Returns false if there is no stream.
local MAX_WAKEUPS = 100

local function wake(stream, field, value)
  return redis.call('XADD', stream, 'NOMKSTREAM', 'MAXLEN', '~', MAX_WAKEUPS, '*', field, value)
end

