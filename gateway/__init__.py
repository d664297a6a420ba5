"""The gateway: HTTP APIs over a queue of calls. It neither decodes images nor tokenizes prompts."""
