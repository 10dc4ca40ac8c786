"""Runs a grid of experiments: the same as `fedjax-ssl sweep`."""
import sys

from fedjax_ssl import cli

if __name__ == '__main__':
  sys.exit(cli.main(['sweep', *sys.argv[1:]]))
