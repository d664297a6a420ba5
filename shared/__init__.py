"""Code that gateway and worker share: protocol, queue, settings, metrics. Imports no other package of this project."""
