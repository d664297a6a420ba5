"""Deployment: packs a directory, uploads missing blobs, and asks the gateway to serve the package."""
