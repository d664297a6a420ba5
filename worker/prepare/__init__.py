"""From blobs to engine inputs."""
