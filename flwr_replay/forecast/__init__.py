"""The ledger that a run would write, and the officer's page of it, before anything leaves."""
