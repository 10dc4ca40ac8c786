"""Reads finished runs, sums them up and draws them."""
