"""Packages: what is deployed, by its digest, where its bytes are, and which deployment serves which of them."""
