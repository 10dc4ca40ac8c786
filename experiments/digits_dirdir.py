r"""Quickstart: real handwritten digits, labels and images skewed over clients.

python experiments/digits_dirdir.py

How rows are dealt, and its defaults: fedjax_ssl/running/settings.py.
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('digits_dirdir')
