"""Packages and deployments: manifests, the package store, and the rollout of package versions."""
