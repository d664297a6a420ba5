"""What gateways keep for a tenant: conversations that later requests go on from."""
