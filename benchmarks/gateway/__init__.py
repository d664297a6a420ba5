"""The overhead of gateway, queue and worker, compared with a bare FastAPI endpoint: `vlm bench gateway`."""
