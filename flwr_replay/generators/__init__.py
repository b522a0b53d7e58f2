"""Generators: what replays images that stay where they are, as codes that travel or a prior that draws new ones."""
