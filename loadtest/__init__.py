"""Load from outside: a client that imports nothing of ours."""
