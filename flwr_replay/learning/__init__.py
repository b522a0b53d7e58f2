"""Compute that knows no Flower: tasks, batches and steps, latents, PushSum."""
