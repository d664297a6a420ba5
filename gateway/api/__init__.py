"""The APIs: a file or a folder each."""
