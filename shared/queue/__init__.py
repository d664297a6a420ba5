"""The queue in Redis: submit, claim, publish, listen."""
