"""Generators for replay: the VQ-VAE-2, its codes as bytes, a prior over codes, and the sampler of replayed batches."""
