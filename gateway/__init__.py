"""The gateway: HTTP APIs over a queue of calls. Images stay encoded, and prompts stay text."""
