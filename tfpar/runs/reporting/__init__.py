"""What a run prints and records: its header, table of epochs, facts, profile and summary."""
