"""Every method through the program, on one, two and four devices.

By default: methods as they are where no knob is given, labels at the clients,
on two devices, one of each kind on one and four as well. Profiles, labels at
the server, other numbers of devices for all, and methods that are another
loss in the round of one that is taken, are thorough.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
import inspect
import json
import re
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

from fedjax_ssl import methods
from tests import toy
from tests.thorough import wider

_CODE = """
import gc, json, sys
from tests.methods import program_test
gc.freeze()  # As in the workers; see `pytest_collection_finish`.
gc.set_threshold(50_000, 10, 50)
for text, place, devices in json.loads(sys.argv[1]):
  print(json.dumps(program_test.trained(text, place, devices)), flush=True)
"""
_ROUNDS = 2
# On two devices each has more than one slot, and its rows of the six clients'
# memories; on four one slot, and all rows.
_DEVICES = (1, 2, 4)
# A mean, a memory of rows, models of other clients, a method's own aggregation:
# regular on several of them.
_REGULAR = {'fedavg': _DEVICES, 'flexmatch': (2,), 'fedmatch': (1, 2),
            'rscfed': (2,)}
# Another loss in the round of flexmatch, semifl or rscfed, which stand for
# them: devices see nothing of a loss. The contract takes them on one.
_ALIKE = ('adamatch', 'fedprox', 'fixmatch', 'freematch', 'local', 'mixmatch',
          'moon', 'pseudo_label', 'sage', 'softmatch', 'twinsight', 'uda',
          'feddb', 'fedcon', 'fedggp', 'fl2', 'fed_consist', 'pdcfed')
# Its bits differ where those of XLA's own products do; see `same_bits`.
_SEES_THREADS = ("fedmatch(profile='v3code')", 'server')
# Processes, so that several processors have work.
_SHARES = 2
# Those of `WIDER`, so short that a limit of time parts them.
_WIDER_SHARES = 6


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


def _name(text: str) -> str:
  return text.partition('(')[0]


def _places(text: str) -> list[str]:
  """Where labels may live."""
  try:
    methods.make(text, toy.task(labels_at='server'))
  except ValueError as error:
    assert 'labels_at' in str(error)
    return ['clients']
  return ['clients', 'server']


CASES = [(text, place) for text in _texts() for place in _places(text)]


def _is_default(text: str) -> bool:
  """Whether this is a method as it is where no knob is given."""
  name, _, profile = text.partition("(profile='")
  if 'keep_local' in text:
    return False
  knob = inspect.signature(methods.METHODS[name]).parameters.get('profile')
  return knob is None or profile == f"{knob.default}')"


DEFAULTS = [(text, place) for text, place in CASES
            if place == 'clients' and _is_default(text)]


class Work(NamedTuple):
  """A case on some numbers of devices, and the process that takes it."""

  text: str
  place: str
  devices: tuple[int, ...]
  share: int


def _dealt(cases: list[tuple[str, str, tuple[int, ...]]], shares: range
           ) -> list[Work]:
  return [Work(*case, shares[i % len(shares)]) for i, case in enumerate(cases)]


def _regular(text: str) -> tuple[int, ...]:
  """The numbers of devices of a method's default."""
  return _REGULAR.get(_name(text), (2,))


REGULAR = _dealt([(*case, _regular(case[0])) for case in DEFAULTS
                  if _name(case[0]) not in _ALIKE], range(_SHARES))
WIDER = _dealt([(*case, _DEVICES) for case in CASES
                if case not in [work[:2] for work in REGULAR]],
               range(2 * _SHARES, 2 * _SHARES + _WIDER_SHARES))
# The other numbers of devices, each in a process beside that of its `REGULAR`,
# with which it is compared.
OTHERS = [Work(work.text, work.place,
               tuple(n for n in _DEVICES if n not in work.devices),
               _SHARES + work.share)
          for work in REGULAR if work.devices != _DEVICES]


def trained(text: str, place: str, devices: Sequence[int], **changes: Any
            ) -> list[dict[str, Any]]:
  """Trains and evaluates as a run does, on devices of this process.

  Returns:
    For each number of devices the hash of every leaf of the state by name, the
    evaluated rounds, and their accuracies; last, of a method as it is by
    default, a report of the program on two. What went wrong in place of all.
  """
  import hashlib

  import jax

  from fedjax_ssl.training import loop, runner
  from fedjax_ssl.training.checkpoint import manifest
  from tests.training import compiled, networks

  runs: list[Any] = []
  # Bits of real keys are the same on all devices for methods of each kind.
  root_keys = (runner.root_keys if _name(text) in _REGULAR
               else lambda seed: tuple(jax.random.split(toy.key(seed))))

  class Seen(runner.Sequential):
    """A run that is kept."""

    def start(self, saved):
      super().start(saved)
      runs.append(self)

  def one(count):
    mesh = None if count == 1 else compiled.mesh(count)
    task = dataclasses.replace(toy.task(
        labels_at=place, mesh=mesh, **changes), model=networks.reordered())
    rows: list[loop.Row] = []
    with (mock.patch.object(runner, 'Sequential', Seen),
          mock.patch.object(runner, 'root_keys', root_keys)):
      result = loop.train(
          methods.make(text, task), [toy.federation(place)[0]],
          num_rounds=_ROUNDS, mesh=mesh,
          observer=loop.Observer(on_row=rows.append))
    return {
        'rounds': [row.round for row in rows],
        'accuracy': [float(row.values['accuracy']) for row in rows],
        'state': {
            name: hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest()
            for name, leaf in manifest.named({'state': result.states[0]})}}

  try:
    found = [one(count) for count in devices]
    if (text, place) in DEFAULTS and 2 in devices:
      run = runs[devices.index(2)]
      found.append({**compiled.report(run), 'elsewhere': len(
          compiled.lowered_for(run, ('cuda', 'tpu')))})
    return found
  except Exception as error:  # The other methods are run all the same.
    return [{'error': f'{type(error).__name__}: {error}'}]


@pytest.fixture(scope='module')
def results(run_python) -> Callable[[int], dict[str, list[dict[str, Any]]]]:
  """What a share's cases came to: one process for each."""
  @functools.cache
  def of(share: int) -> dict[str, list[dict[str, Any]]]:
    works = [w for w in [*REGULAR, *WIDER, *OTHERS] if w.share == share]
    output = run_python(_CODE, json.dumps([w[:3] for w in works]),
                        devices=max(_DEVICES), timeout=3600)
    return dict(zip([f'{w.text}-{w.place}' for w in works],
                    map(json.loads, output.splitlines()), strict=True))
  return of


def _of(works: list[Work]) -> Any:
  """The test of cases; its name ends with its process, as `_group` reads it."""
  return pytest.mark.parametrize('text, place, share', [
      (w.text, w.place, w.share) for w in works])


def test_every_method_is_one_of_the_defaults():
  assert [_name(text) for text, _ in DEFAULTS] == [*methods.METHODS]
  assert {*_ALIKE} < {*methods.METHODS}
  for count in _DEVICES:
    taken = [w[:2] for w in [*REGULAR, *OTHERS, *WIDER] if count in w.devices]
    assert sorted(taken) == sorted(CASES)


def _agree(found: list[dict[str, Any]]) -> None:
  """Holds what several numbers of devices came to against the first."""
  first, *others = found
  assert first.get('error') is None
  assert first['rounds'] == [*range(1, _ROUNDS + 1)]
  assert all(0 <= value <= 1 for value in first['accuracy'])
  for other in others:
    assert other == first


@_of(REGULAR)
def test_any_number_of_devices_trains_and_evaluates_the_same(
    results, text, place, share):
  found = results(share)[f'{text}-{place}']
  _agree(found[:1])  # An error is all that there is.
  *found, _ = found
  assert len(found) == len(_regular(text))
  _agree(found)


@pytest.mark.thorough
@_of(WIDER)
def test_so_do_profiles_and_labels_at_the_server(
    results, same_bits, text, place, share):
  found = results(share)[f'{text}-{place}']
  assert len(found) == len(_DEVICES) + ((text, place) in DEFAULTS)
  if (text, place) == _SEES_THREADS:
    _agree(found[:1])
    for other in found[1:len(_DEVICES)]:
      same_bits(other, found[0])
  else:
    _agree(found[:len(_DEVICES)])


@pytest.mark.thorough
@_of([w for w in REGULAR if w.devices != _DEVICES])
def test_other_numbers_train_and_evaluate_as_two(
    results, text, place, share):
  known, *_ = results(share)[f'{text}-{place}']
  others = results(_SHARES + share)[f'{text}-{place}']
  _agree([known, *others])
  assert len(others) == len(_DEVICES) - len(_regular(text))


@pytest.mark.parametrize('text, place, share', [
    (w.text, w.place, w.share) for w in REGULAR] + wider(*(
        (w.text, w.place, w.share) for w in WIDER if w[:2] in DEFAULTS)))
def test_nothing_slow_in_a_round(results, text, place, share):
  """No clock is read. What is looked for costs a factor of 2 to 60.

  Convolutions in a layout that misses the fast kernel, those with batch groups,
  activations that travel between devices, compilation in the middle of a run.
  That each is found if it is there: `training/round_hlo_test.py`.
  """
  report = results(share)[f'{text}-{place}'][-1]
  assert report['convolutions'] and not report['slow'], report
  assert not report['groups']
  # Devices exchange models and numbers only.
  assert report['exchanges'] and not report['strange'], report
  # From the first state on, which is made and placed as runs do it.
  assert report['programs'] == [1, 1]
  assert report['elsewhere']  # It is lowered for accelerators too.


@pytest.mark.parametrize('share', [
    *range(_SHARES), *(pytest.param(share, marks=pytest.mark.thorough)
                       for share in sorted({w.share for w in WIDER}))])
def test_methods_differ(results, share):
  """Equal hashes mean something: other methods have others."""
  states = {str(first['state']) for first, *_ in results(share).values()}
  assert len(states) > _SHARES
