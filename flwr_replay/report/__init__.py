"""Reports on runs: statistics, tables, pictures, progress."""
