"""How Redis is reached, and the server that comes along."""
