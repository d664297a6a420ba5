"""Prepares calls for the engine: fetches and decodes media in sandboxed processes, and builds prompts."""
