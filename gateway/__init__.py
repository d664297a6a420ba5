"""The HTTP side of the fleet. It handles images as bytes and prompts as text."""
