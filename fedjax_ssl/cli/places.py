"""Where the repository is, for programs that run from a checkout of it."""
from __future__ import annotations

import pathlib


def repository() -> pathlib.Path | None:
  """Returns the checkout's root; None of an installed copy."""
  root = pathlib.Path(__file__).resolve().parents[2]
  found = (root / 'setup.py').is_file() and (root / 'experiments').is_dir()
  return root if found else None
