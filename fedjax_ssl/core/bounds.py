"""The two runs between which a method is measured: FedAvg on few or all labels.

They are trained beside a run, in folders below its own.
"""
from __future__ import annotations

# Their names in tables, by --labels.
NAMES = {'few': 'labels only (lower bound)', 'all': 'all labels (upper bound)'}


def folder(labels: str) -> str:
  """Returns the name of a bound's folder, by --labels."""
  return f'labels_{labels}'


FOLDERS = tuple(map(folder, NAMES))
