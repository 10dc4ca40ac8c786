"""Stored numbers of cells: when they are no longer those of the table."""
from __future__ import annotations

import json
from typing import Any

import pytest

from fedjax_ssl.papers import results


class Cell:
  """As much of a cell as counts here."""

  def __init__(self, *flags: str):
    self.flags = list(flags)


@pytest.mark.parametrize('stored, stale', [
    (['--method=pseudo_label(labeled_client_weight=3.0)', '--alpha=1'], False),
    (['--alpha=1', '--method=pseudo_label(labeled_say=3.0)'], False),
    (['--method=pseudo_label(labeled_say=2.0)', '--alpha=1'], True),
    (['--method=pseudo_label(labeled_client_weight=3.0)', '--alpha=1',
      '--seeds=0,1'], False),
    (['--method=pseudo_label(labeled_client_weight=3.0)'], True)])
def test_other_flags_make_numbers_stale_but_no_other_names(stored, stale):
  cell: Any = Cell('--method=pseudo_label(labeled_client_weight=3.0)',
                   '--alpha=1', '--seeds=0')
  assert results.is_stale(cell, {'flags': stored}) == stale
  assert not results.is_stale(cell, {})


def test_a_name_that_is_old_elsewhere_is_another_knob_here():
  cell: Any = Cell('--method=fedmatch(labeled_client_weight=3.0)')
  assert results.is_stale(cell, {'flags': [
      '--method=fedmatch(labeled_weight=3.0)']})


@pytest.mark.parametrize('flags', [None, [1], '--x=1'])
def test_damaged_flags_are_told(tmp_path, flags):
  file = tmp_path / 'cell.json'
  file.write_text(json.dumps({'cell': 'a', 'flags': flags, 'extra_flags': [],
                              'seeds': {'0': {}}}))
  with pytest.raises(ValueError, match='cell.json is damaged.*no list of te'):
    results.read(file)
