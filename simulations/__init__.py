"""Studies that run by hand."""
