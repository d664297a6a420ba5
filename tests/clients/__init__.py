"""Published third-party clients against a server of this project."""
