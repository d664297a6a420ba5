"""Images on their way in: inline or fetched, checked by their headers."""
