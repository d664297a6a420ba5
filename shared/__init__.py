"""What gateway and worker both need: the wire, the queue, settings, metrics. Imports nothing of ours."""
