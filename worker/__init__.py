"""The worker: runs the requests of the queue in Redis on an engine. Imports engines and shared."""
