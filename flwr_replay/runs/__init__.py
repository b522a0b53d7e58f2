"""One run: its directory, and the engines that execute it."""
