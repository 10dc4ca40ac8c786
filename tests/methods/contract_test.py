"""What every registered method must hold, wherever labels live."""
from __future__ import annotations

from collections.abc import Callable, Iterable
import functools
import inspect
import itertools
from typing import Any

import chex
import pytest

from fedjax_ssl import methods, testing
from fedjax_ssl.testing import contract
from tests import toy
from tests.methods import checkpoint_names
from tests.thorough import wider
from tests.training import schema_test

# One method's other half: helpers by similarity, not in every round, and
# messages of differences. And a memory with an axis of its own.
OTHER = ("fedmatch(profile='v3code', helper_interval=2)",
         "adamatch(profile='code', window=3)")
# One of each kind of round; that of the others differs in a client's step
# alone, so that for them these are more samples.
_AT_SERVER = ('fedmatch', 'semifl')
_TOGETHER = ('feddure', 'fedmatch')


def _others() -> list[str]:
  """The keeping of local models, by one method, and `OTHER`."""
  keeper = [f'{name}(keep_local=True)'
            for name, builder in methods.METHODS.items()
            if 'keep_local' in inspect.signature(builder).parameters]
  return [*keeper[-1:], *OTHER]


def _places(text: str) -> list[str]:
  return testing.places_of(functools.partial(methods.make, text))


def _cases(texts: Iterable[str]) -> list[tuple[str, str]]:
  return [(text, place) for text in texts for place in _places(text)]


def _split(cases: list[Any], usual: Callable[[Any], bool]) -> list[Any]:
  """The cases, of which those that are not usual are thorough."""
  return [*filter(usual, cases),
          *wider(*itertools.filterfalse(usual, cases))]


def _is_usual(case: tuple[str, str]) -> bool:
  text, place = case
  return text in methods.METHODS and (
      place == 'clients' or text in _AT_SERVER)


def _law_of(case: tuple[str, str], law: str) -> Any:
  """A law for a case; its name ends in (law).

  So that all laws of a method run on one worker, which has its programs: see
  `_group` of tests/conftest.py.
  """
  return pytest.param(
      *case, law, id=f'{"-".join(case)}({law})',
      marks=() if _is_usual(case) else pytest.mark.thorough)


def _is_told_by(case: tuple[str, str], law: str) -> bool:
  """Whether a case can tell more of a law than others do.

  Methods are made anew by one code, and none of ours draws outside JAX: that
  law is for users' own.
  """
  return law != 'made_anew_it_is_the_same' or case[0] in _TOGETHER


cases = _cases([*methods.METHODS, *_others()])
texts = pytest.mark.parametrize('text', _split(
    [*methods.METHODS, *_others()], lambda text: text in _TOGETHER))


@functools.lru_cache
def _runner(text, model, place, **changes):
  return contract.CohortRunner(
      functools.partial(methods.make, text), model, place, **changes)


@functools.lru_cache
def _model(text, place):
  found = testing.model_of(functools.partial(methods.make, text), place)
  # Of a user's method whole numbers are not asked for, of the library's they
  # are.
  return 'counting' if found == 'conv' else found


def runner(text, place):
  """Clients one after another, with networks that normalize by batches."""
  return _runner(text, _model(text, place), place)


def limited(text):
  """Under vmap, two at a time, with updates of a norm of at most `NORM`."""
  return _runner(text, _model(text, 'clients'), 'clients', client_map='vmap',
                 chunk_size=2, max_update_norm=contract.NORM)


@pytest.mark.parametrize('text, place, law', [
    _law_of(case, law) for case in cases for law in contract.LAWS
    if _is_told_by(case, law)])
def test_the_law_holds(text, place, law):
  try:
    contract.LAWS[law](runner(text, place))
  except contract.Skip as skip:
    pytest.skip(str(skip))


@pytest.mark.parametrize('text', methods.METHODS)
def test_rows_fit_the_schema(text):
  one = runner(text, 'clients')
  state, totals = one.start
  schema_test.check(text, schema_test.with_scores(
      one.method, state, one.federation, totals.sums))


@pytest.mark.parametrize('text', methods.METHODS)
def test_earlier_runs_continue(text):
  """Checkpoints hold what they held; `checkpoint_names` says what to do."""
  found = checkpoint_names.stored()
  assert checkpoint_names.of(runner(text, 'clients')) == sorted(
      [*found['all'], *found[text]])


@texts
def test_map_without_a_norm_and_vmap_within_one_agree(text):
  """Chunks of two; a limit that nobody exceeds changes nothing."""
  one, other = runner(text, 'clients'), limited(text)
  cohort = one.of([0, 2, toy.NOBODY, 5])
  mapped, together = (x.rounds(1, federation=cohort) for x in (one, other))
  alone, padded = (float(share.total / share.rows) for share in (
      totals.sums.pop('masked_share') for _, totals in (mapped, together)))
  chex.assert_trees_all_close(mapped, together, rtol=2e-4, atol=2e-5)
  assert padded >= alone


@pytest.mark.parametrize('text, place', _split(
    [(text, place) for text, place in cases
     if text == 'local' or 'keep_local' in text], _is_usual))
def test_a_local_model_of_a_sampled_client_changes(text, place):
  one = runner(text, place)
  before = one.start[0].memory
  after = one.rounds(2, federation=one.of([0, 2]))[0].memory
  with pytest.raises(AssertionError):
    chex.assert_trees_all_equal(before, after)


@texts
def test_updates_beyond_the_norm_are_left_out(text):
  one = limited(text)
  state, totals = one.rounds(1, federation=one.of(
      [0, 3, 5], broken=[0, 3, 5], color=contract.FAR))
  if one.method.aggregate is None:
    assert float(totals.sums['num_rejected']) == 0  # Nobody sends anything.
    return
  assert float(totals.sums['num_rejected']) == 3
  chex.assert_trees_all_equal(state._replace(round=0),
                              one.start[0]._replace(round=0))
