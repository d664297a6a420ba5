"""API keys that are created, limited and revoked while the gateways run."""
