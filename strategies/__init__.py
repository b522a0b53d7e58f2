"""The server's half of each method: who gets what, and when."""
