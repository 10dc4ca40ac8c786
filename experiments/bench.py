#!/usr/bin/env python3
"""Compares methods on the bench: `python experiments/bench.py clients`."""
import sys

from fedjax_ssl import cli

if __name__ == '__main__':
  sys.exit(cli.main(['bench', *sys.argv[1:]]))
