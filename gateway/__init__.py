"""HTTP in, SSE out. Knows images as bytes and requests as text; imports neither torch nor engines."""
