"""The server's half of every method: who takes part, what is asked, what an answer may be, what is recorded."""
