"""Finished runs read, summed up and drawn."""
