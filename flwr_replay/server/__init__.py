"""The server's half of every method: members, messages, checks of answers, pooled metrics, what a run records."""
