"""The institution's half of each method: what is computed on private data."""
