"""Redis on one side, an engine on the other. Imports engines and shared."""
