"""How the built-in model was trained. In the repository, not in the wheel."""
