"""What an institution keeps on its disk: of each run its state, and the key that proves who it is."""
