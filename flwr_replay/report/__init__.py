"""What is said about runs once they are over: statistics, tables, pictures."""
