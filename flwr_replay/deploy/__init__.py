"""A deployment over a network: its folder, an institution's check, the coordinator's, a rehearsal."""
