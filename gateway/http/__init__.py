"""The HTTP server and what every API shares."""
