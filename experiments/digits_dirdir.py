r"""Quickstart: real handwritten digits, labels and images skewed over clients.

20 clients, 10 labels a class in all, Dirichlet(0.5) over labeled and over
unlabeled rows: FixMatch between the labels-only and the all-labels bound.

python experiments/digits_dirdir.py

Defined in fedjax_ssl/cli/settings.py.
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('digits_dirdir')
