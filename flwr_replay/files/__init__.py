"""Files written completely or not at all, with checksums, for their owner only; JSON, JSON lines and named arrays."""
