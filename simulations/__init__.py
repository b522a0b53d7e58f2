"""Studies, which `flwr-replay study` runs."""
