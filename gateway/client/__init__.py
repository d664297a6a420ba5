"""Clients of a gateway for the terminal. They speak its public API only."""
