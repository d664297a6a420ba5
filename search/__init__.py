"""Vector search: indexes, the search process and its commands."""
