"""From files to a model in memory."""
