"""Form global batches from rows, and operate on batches."""
