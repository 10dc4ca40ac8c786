"""python -m fedjax_ssl: the command `fedjax-ssl`."""
from __future__ import annotations

import sys

from fedjax_ssl import cli

if __name__ == '__main__':
  sys.exit(cli.main())
