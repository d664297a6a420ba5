"""Records that gateways store for a tenant, such as conversations that later requests continue."""
