"""The bench: every method on the same beds, with the same budget to tune.

A bed is one federation, network and schedule on which labels only and all
labels are far apart. Each method gets equally many configurations, chosen on
the validation rows of a seed that is not used again; then other seeds.
"""
from fedjax_ssl.bench import page, plan, standing

__all__ = ['page', 'plan', 'standing']
