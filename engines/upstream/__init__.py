"""Engines that run in another process: vLLM, SGLang and llama-server, over HTTP."""
