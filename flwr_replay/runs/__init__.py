"""One run's record: its directory, its opening, its checkpoints, and the loop that executes it."""
