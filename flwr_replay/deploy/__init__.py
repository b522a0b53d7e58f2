"""A deployment over a network: its folder, a clinic's check, the coordinator's, a rehearsal."""
