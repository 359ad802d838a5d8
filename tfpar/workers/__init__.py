"""The workers of a job: how they connect, lend devices, and notice that one is lost."""
