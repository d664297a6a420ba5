"""Content-addressed storage of request media: blobs are stored under their SHA-256."""
