"""Training of `shapes`, the built-in model that chats."""
