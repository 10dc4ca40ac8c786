"""PyTorch's side in a process of its own: its pages, and how it may end."""
from __future__ import annotations

import os

import numpy as np
import pytest

from fedjax_ssl.running import huge_pages

PLACE = 'tests.programs.fake_loop:made'


def apart(bench, fails=False, **variables):
  return bench('torch_apart').Apart(
      PLACE, (fails,), {**os.environ, **variables})


def test_it_has_the_variables_that_it_is_given(bench):
  process = apart(bench, GLIBC_TUNABLES='glibc.malloc.hugetlb=1')
  assert process.version == 'glibc.malloc.hugetlb=1'
  for _ in range(2):
    process.advance(np.arange(3))


def test_its_errors_are_told(bench):
  with pytest.raises(ValueError, match='process: ValueError: no such layout'):
    apart(bench, fails=True)
  process = apart(bench)
  process.advance(np.arange(3))
  with pytest.raises(ValueError, match='process: RuntimeError: no memory'):
    process.advance(np.array([8]))
  with pytest.raises(ValueError, match='process ended: exit status 0'):
    process.advance(np.arange(3))


def test_how_it_ended_is_told(bench):
  process = apart(bench)
  with pytest.raises(ValueError, match='process ended: signal SIGKILL'):
    process.advance(np.array([9]))


def test_a_round_without_end_is_ended(bench, monkeypatch):
  process = apart(bench)
  module = bench('torch_apart')
  monkeypatch.setattr(module, '_PATIENCE', .2)
  monkeypatch.setattr(module, '_END', .2)
  with pytest.raises(ValueError, match='process: no answer in 0 s'):
    process.advance(np.array([7]))
  with pytest.raises(ValueError, match='process ended: signal SIGKILL'):
    process.advance(np.array([7]))


@pytest.mark.parametrize('given, rest', [
    ('', None), ('glibc.malloc.hugetlb=1', None),
    ('a.b=2:glibc.malloc.hugetlb=0', 'a.b=2')])
def test_only_the_word_on_pages_is_taken_away(given, rest):
  found = huge_pages.without({'HOME': 'x', 'GLIBC_TUNABLES': given})
  assert found.pop('GLIBC_TUNABLES', None) == rest
  assert found == {'HOME': 'x'}


@pytest.mark.parametrize('modes, tunables', [
    ('always [madvise] never', 'a.b=2:glibc.malloc.hugetlb=1'),
    ('[always] madvise never', 'a.b=2')])
def test_pages_are_asked_for_where_that_changes_something(
    monkeypatch, modes, tunables):
  monkeypatch.setattr(huge_pages, '_modes', lambda: modes)
  monkeypatch.setattr(huge_pages, '_libc', lambda: 'glibc 2.36')
  asked = huge_pages.asking({'GLIBC_TUNABLES': 'a.b=2'})
  assert asked == {'GLIBC_TUNABLES': tunables}
  assert huge_pages.said(asked) == f'{modes.split("[")[1].split("]")[0]}; ' + (
      tunables)
