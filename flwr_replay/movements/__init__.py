"""The four shapes of a method over Flower's rounds: parallel, serial, one-shot, relay."""
