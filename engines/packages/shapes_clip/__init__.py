"""The built-in model that finds images by words."""
