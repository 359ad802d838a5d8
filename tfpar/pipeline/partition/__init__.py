"""From the graph of a model to its stages."""
