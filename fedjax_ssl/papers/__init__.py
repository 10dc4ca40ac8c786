"""The papers' tables: their published numbers, and the flags of each run."""
from fedjax_ssl.papers import cells, flagfiles, flags, results

__all__ = ['cells', 'flagfiles', 'flags', 'results']
