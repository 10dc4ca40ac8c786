"""Names of what checkpoints hold, by method, which later versions must keep.

`python -m tests.methods.checkpoint_names` writes them anew, after a change
because of which earlier runs of a method may no longer continue.
"""
from __future__ import annotations

import json
import pathlib
import re

from fedjax_ssl import methods
from fedjax_ssl.testing import contract
from fedjax_ssl.training.checkpoint import manifest

FILE = pathlib.Path(__file__).with_suffix('.json')
_LAYER = re.compile(r'\.(kernel|bias|scale|mean|var)$')


def of(one: contract.CohortRunner) -> list[str]:
  """The names of state and totals at the start, layers aside."""
  names = (_LAYER.sub('', name) for name, _ in manifest.named(one.start))
  return sorted({re.sub(r'\b(params|stats)\..*', r'\1', n) for n in names})


def stored() -> dict[str, list[str]]:
  """By method, besides those in 'all'."""
  found: dict[str, list[str]] = json.loads(FILE.read_text())
  return found


def main() -> None:
  """Writes the names of every method."""
  from tests.methods import contract_test
  found = {text: of(contract_test.runner(text, 'clients'))
           for text in methods.METHODS}
  common = sorted(set.intersection(*map(set, found.values())))
  lines = {'all': common, **{text: [n for n in names if n not in common]
                             for text, names in found.items()}}
  FILE.write_text(json.dumps(lines, indent=0) + '\n')


if __name__ == '__main__':
  main()
