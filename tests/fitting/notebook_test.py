"""The notebook runs from its first cell to its last.

Its cells are run one after another in one namespace, as a kernel does, so that
no kernel has to be installed: the cells have no magics and show nothing that
a later one needs.
"""
from __future__ import annotations

import json

import numpy as np


def test_the_quickstart_runs(root, capsys):
  notebook = json.loads(
      (root / 'experiments/examples/quickstart.ipynb').read_text('utf-8'))
  assert notebook['nbformat'] == 4
  scope: dict = {}
  for cell in notebook['cells']:
    assert cell['cell_type'] in ('code', 'markdown')
    if cell['cell_type'] == 'code':
      assert cell['outputs'] == []
      exec(''.join(cell['source']), scope)  # The repository's own text.
  run = scope['run']
  assert run.round == 30
  np.testing.assert_array_equal(run.metrics['round'], np.arange(5, 31, 5))
  assert run.metrics['accuracy'][-1] > 0.5  # Of ten classes.
  assert 'fixmatch' in capsys.readouterr().err
