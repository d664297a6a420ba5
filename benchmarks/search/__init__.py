"""`vlm bench search`: exact search compared with the indexes."""
