"""The data sources, one module each."""
