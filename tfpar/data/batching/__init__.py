"""From rows to global batches."""
