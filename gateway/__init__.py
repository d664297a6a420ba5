"""HTTP in, SSE out. Knows pictures as bytes and requests as text; imports neither torch nor engines."""
