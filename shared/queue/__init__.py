"""The request queue in Redis, for gateways and workers."""
