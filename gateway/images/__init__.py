"""Images of requests: inline or fetched, checked by their headers."""
