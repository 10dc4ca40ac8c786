"""The bench: every method on the same beds, with the same budget to tune.

A bed is one federation, network and schedule on which the two bounds, labels
only and all labels, are far apart. Each method may try the same number of
configurations. The best one, by the validation rows of a seed that is used for
nothing else, then runs with other seeds.
"""
from fedjax_ssl.bench import page, picture, plan, records, standing

__all__ = ['page', 'picture', 'plan', 'records', 'standing']
