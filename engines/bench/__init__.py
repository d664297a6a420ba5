"""The engine measured alone: no HTTP, no queue, no pictures to decode."""
