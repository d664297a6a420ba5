"""The engine measured alone: no HTTP, no queue, no images to decode."""
