"""The HTTP server and what every API shares. It knows no API."""
