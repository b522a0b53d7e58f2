"""Differential privacy at an institution: accounting, DP-SGD, secret noise, budgets, and the tools for epsilon.

Everywhere two data sets are neighbours if one has one *example* more than the other; their number is taken as known.
"""
