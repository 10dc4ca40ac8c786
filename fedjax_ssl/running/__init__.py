"""A run: its setting dealt, its job built, trained and continued.

The programs in `cli` and `fitting.fit` both start here. Importing this package
alone loads nothing else, not even JAX.
"""
