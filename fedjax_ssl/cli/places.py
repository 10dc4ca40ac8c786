"""Where the repository is, and where the runs are that words name."""
from __future__ import annotations

from collections.abc import Sequence
import pathlib


def repository() -> pathlib.Path | None:
  """Returns the checkout's root; None of an installed copy."""
  root = pathlib.Path(__file__).resolve().parents[2]
  found = (root / 'setup.py').is_file() and (root / 'experiments').is_dir()
  return root if found else None


def runs_in(words: Sequence[str]) -> list[str]:
  """Returns the folders with runs, and words that name nothing.

  A folder of runs, such as a sweep's, stands for all of them; what else there
  is, such as their logs, is passed over. If there is no run: all words.
  """
  found: list[str] = []
  for word in words:
    path = pathlib.Path(word)
    if (path / 'config.json').exists() or not path.exists():
      found.append(word)
    else:
      found += [str(file.parent) for file in sorted(path.glob('*/config.json'))]
  return [*dict.fromkeys(found or words)]
