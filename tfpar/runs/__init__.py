"""A run of the train command: its folder, its report, its trainer."""
