"""A run on a Ray cluster of several computers."""
