"""A run of the train command: its directory, its trainer and what it prints."""
