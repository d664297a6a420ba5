"""Sessions of applications, and the states of their tasks."""
