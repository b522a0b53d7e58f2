"""Generative replay (Qu et al. 2022, Algorithm 1): a generator is trained from institution to institution, and what it
replays stands beside the real images of every batch of a method's classifier.
"""
