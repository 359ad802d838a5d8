"""What all workers of a loop decide together: barriers, votes, errors, equal arguments."""
