"""The supervisor of one machine: starts, watches and drains its processes."""
