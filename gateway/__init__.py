"""The HTTP side of the fleet: images are bytes here, and requests are text."""
