"""MyMethod, a strategy for flwr-replay."""
