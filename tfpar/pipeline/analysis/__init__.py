"""What a pipeline will be and was: durations, memory, tables, pictures."""
