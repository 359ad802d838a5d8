"""Agreement of all workers: barriers, votes, deferred errors, equal arguments."""
