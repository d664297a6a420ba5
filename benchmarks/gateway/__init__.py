"""The price of a request's way, measured beside a bare FastAPI endpoint: `vlm bench gateway`."""
