"""Many steps in one call of a compiled loop, with the next batch copied ahead."""
