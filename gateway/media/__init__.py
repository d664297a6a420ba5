"""Loads and checks the images, videos and audio of requests."""
