"""Which worker reads which examples."""
