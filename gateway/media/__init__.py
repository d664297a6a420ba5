"""Media of requests: inline or fetched, checked by their first bytes."""
