"""Any model that transformers implements, its own modules over our pages of keys and values."""
