"""Every method through the program, on one, two and four devices."""
from __future__ import annotations

from collections.abc import Callable
import functools
import inspect
import json
import re
from typing import Any

import numpy as np
import pytest

from fedjax_ssl import methods
from tests import toy

_CODE = """
import json, sys
from tests.methods import program_test
for text, place in json.loads(sys.argv[1]):
  print(json.dumps(program_test.trained(text, place)), flush=True)
"""
_ROUNDS = 2
_DEVICES = (1, 2, 4)


def _texts() -> list[str]:
  """Every method with each of its profiles, and one that keeps models."""
  out = []
  for name, builder in methods.METHODS.items():
    profiles = ['']
    if 'profile' in inspect.signature(builder).parameters:
      with pytest.raises(ValueError, match='profile') as refusal:
        methods.make(f"{name}(profile='?')", toy.task())
      _, _, listed = str(refusal.value).partition('Allowed: ')
      profiles = [f"(profile='{profile}')"
                  for profile in re.findall(r'\w+', listed)]
      assert profiles
    out += [name + profile for profile in profiles]
  return [*out, 'fixmatch(keep_local=True)']


def _places(text: str) -> list[str]:
  """Where labels may live."""
  try:
    methods.make(text, toy.task(labels_at='server'))
  except ValueError as error:
    assert 'labels_at' in str(error)
    return ['clients']
  return ['clients', 'server']


CASES = [(text, place) for text in _texts() for place in _places(text)]


def trained(text: str, place: str, **changes: Any) -> list[dict[str, Any]]:
  """Trains and evaluates as a run does, on 1, 2 and 4 devices of this process.

  Returns:
    For each number of devices the hash of every leaf of the state by name, the
    evaluated rounds, and their accuracies; what went wrong in place of them.
  """
  import hashlib

  import jax

  from fedjax_ssl.training import loop
  from fedjax_ssl.training.checkpoint import manifest

  def one(count):
    mesh = None if count == 1 else jax.make_mesh(
        (count,), ('clients',), devices=jax.devices()[:count],
        axis_types=(jax.sharding.AxisType.Auto,))
    method = methods.make(text, toy.task(
        labels_at=place, mesh=mesh, **changes))
    rows: list[loop.Row] = []
    result = loop.train(
        method, [toy.federation(place)[0]], num_rounds=_ROUNDS, mesh=mesh,
        observer=loop.Observer(on_row=rows.append))
    return {
        'rounds': [row.round for row in rows],
        'accuracy': [float(row.values['accuracy']) for row in rows],
        'state': {
            name: hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()
            for name, leaf in manifest.named({'state': result.states[0]})}}

  try:
    return [one(count) for count in _DEVICES]
  except Exception as error:  # The other methods are run all the same.
    return [{'error': f'{type(error).__name__}: {error}'}]


@pytest.fixture(scope='module')
def results(run_python) -> Callable[[str], dict[str, list[dict[str, Any]]]]:
  """What a place's cases came to, by method: one process for each place."""
  @functools.cache
  def of(place: str) -> dict[str, list[dict[str, Any]]]:
    cases = [case for case in CASES if case[1] == place]
    output = run_python(_CODE, json.dumps(cases), devices=max(_DEVICES),
                        timeout=3600)
    return dict(zip((text for text, _ in cases),
                    map(json.loads, output.splitlines()), strict=True))
  return of


@pytest.mark.parametrize('text, place', CASES)
def test_any_number_of_devices_trains_and_evaluates_the_same(
    results, text, place):
  first, *others = results(place)[text]
  assert first.get('error') is None
  assert first['rounds'] == [*range(1, _ROUNDS + 1)]
  assert all(0 <= value <= 1 for value in first['accuracy'])
  assert len(others) == len(_DEVICES) - 1
  for other in others:
    assert other == first


def test_methods_differ(results):
  """Equal hashes mean something: other methods have others."""
  found = results('clients')
  states = {str(first['state']) for first, *_ in found.values()}
  assert len(states) > 1
