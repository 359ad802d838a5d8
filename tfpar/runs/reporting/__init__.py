"""What a run prints and records: header, epoch table, summary, facts, profile."""
