"""The HTTP server, and the code that all APIs share."""
