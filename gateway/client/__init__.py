"""Terminal clients of a gateway. They use its public API only."""
