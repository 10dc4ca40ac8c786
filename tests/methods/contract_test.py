"""What every registered method must hold, wherever labels live."""
from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import rounds, sampling, tree
from fedjax_ssl.core.types import Cohort, Ratio, SUMMED
from fedjax_ssl.methods.parts import mean_teacher
from fedjax_ssl.training import checkpoint, metrics
from fedjax_ssl.training import runner as runner_lib
from tests import toy

# One method's other half: helpers by similarity, not in every round, and
# messages of differences.
OTHER = "fedmatch(profile='v3code', helper_interval=2)"


def _texts() -> list[str]:
  """Every method, once the keeping of local models, and `OTHER`."""
  keeper = [f'{name}(keep_local=True)'
            for name, builder in methods.METHODS.items()
            if 'keep_local' in inspect.signature(builder).parameters]
  return [*methods.METHODS, *keeper[-1:], OTHER]


def _places(text: str) -> list[str]:
  """Where labels may live: everywhere, if the method communicates."""
  task = toy.task(labels_at='server')
  try:
    methods.make(text, task)
  except ValueError as error:
    assert 'labels_at' in str(error)
    return ['clients']
  return ['clients', 'server']


CASES = [(text, place) for text in _texts() for place in _places(text)]
cases = pytest.mark.parametrize('text, place', CASES)


# Colors of clients that break: to NaN, to a huge message, or beyond `NORM`.
WHITE, HUGE, FAR = 255, 254, 253
NORM = 1e6  # No client of the toy federation gets as far by training.


class Runner:
  """A method on the toy federation, compiled once."""

  def __init__(self, text: str, model: str, place: str, **changes):
    self.federation, self.hidden = toy.federation(place)
    task = toy.task(model, labels_at=place, **changes)
    self.method = methods.make(text, task)
    self.run: Any = jax.jit(functools.partial(runner_lib.stretch, self.method))
    self.init_key, self.root = runner_lib.root_keys(3)
    state = self.method.init(self.init_key, self.federation)
    totals = tree.zeros_like(
        runner_lib.totals_shape(self.method, self.federation, state))
    self.start = jax.tree.map(jnp.asarray, (state, totals))

  def rounds(self, count, start=None, first=0, federation=None):
    """(state, totals) after `count` rounds from round `first`."""
    return self.run(*(start or self.start), federation or self.federation,
                    jnp.int32(first), jnp.int32(count), self.root)


class CohortRunner(Runner):
  """A runner that is told who takes part: one program for every cohort.

  Rounds never read the test set, so its labels can carry the cohort.
  """

  SIZE = 4

  def __init__(self, text: str, model: str, place: str, **changes):
    def sample(state, federation, key):
      del state, key
      told = federation.test.labels[:2 * self.SIZE].reshape(1, 2, self.SIZE)
      return Cohort(told[:, 0], told[:, 1] > 0)
    with (mock.patch.object(sampling, 'groups', lambda number, size: sample),
          mock.patch.object(mean_teacher, 'after_warmup',
                            lambda told, rounds: told),
          mock.patch.object(rounds, 'client_pass', _breakable)):
      super().__init__(text, model, place, **changes)
    # Rows of both kinds, labels alone, others alone, and both again.
    self.federation = self.of([0, 1, 2, 5])

  def of(self, ids, active=None, broken=(), color=WHITE):
    """The federation of a cohort, some clients' images broken if wanted."""
    active = [True] * len(ids) if active is None else active
    rest = [0] * (self.SIZE - len(ids))
    told = jnp.array([*ids, *rest, *active, *rest], jnp.int32)
    out = self.federation
    for client in broken:
      out = _break(out, client, color)
    labels = jnp.asarray(out.test.labels).at[:told.size].set(told)
    return dataclasses.replace(out, test=out.test._replace(labels=labels))


_runner = functools.lru_cache(CohortRunner)


def runner(text, place):
  """Clients one after another, with networks that normalize by batches."""
  return _runner(text, 'conv' if place == 'clients' else 'linear', place)


def limited(text):
  """Under vmap, two at a time, with updates of a norm of at most `NORM`."""
  return _runner(text, 'conv', 'clients', client_map='vmap', chunk_size=2,
                 max_update_norm=NORM)


_client_pass = rounds.client_pass


def _breakable(task, client_update, aggregate, **knobs):
  """client_pass whose clients break if their first image is of one color.

  They give NaN if it is `WHITE`, a huge message if `HUGE`, and one beyond
  `NORM` if `FAR`.
  """
  def update(payload, client, key):
    shard = client.shard
    first = jnp.where(shard.num_labeled > 0, shard.labeled[0],
                      shard.unlabeled[0])
    white, huge, far = ((client.train.inputs[first] == color).all()
                        for color in (WHITE, HUGE, FAR))
    spoil = jnp.where(white, jnp.nan, 0.0)
    made = client_update(payload, client, key)
    def add(x, spoil):
      return (x + spoil).astype(x.dtype) if jnp.issubdtype(
          x.dtype, jnp.floating) else x
    moved = jnp.where(huge, 3e38, jnp.where(far, 2 * NORM, spoil))
    return made._replace(
        message=jax.tree.map(lambda x: add(x, moved), made.message),
        memory=jax.tree.map(lambda x: add(x, spoil), made.memory))
  return _client_pass(task, update, aggregate, **knobs)


def _break(federation, client, color):
  """Makes a client's images white, or of another color."""
  shard = tree.take(federation.clients, client)
  rows = jnp.concatenate([shard.labeled[:shard.num_labeled],
                          shard.unlabeled[:shard.num_unlabeled]])
  inputs = jnp.asarray(federation.train.inputs).at[rows].set(color)
  return dataclasses.replace(
      federation, train=federation.train._replace(inputs=inputs))


def _record(state):
  """All numbers of a state but its clock."""
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32),
                      (state.server, state.memory))


@cases
def test_state_keeps_its_form_and_metrics_are_finite(text, place):
  one = runner(text, place)
  state, totals = one.rounds(3)
  chex.assert_trees_all_equal_shapes_and_dtypes(state, one.start[0])
  chex.assert_tree_all_finite((state, totals))
  assert int(state.round) == 3 and float(totals.rounds) == 3
  whole = {k for k, v in totals.sums.items() if isinstance(v, Ratio)}
  row = {name: value / (1 if name in {*whole, *SUMMED} else 3)
         for name, value in toy.means(totals.sums).items()}
  metrics.validate(metrics.to_plain({'round': 3, **row}))
  moved = tree.global_norm(tree.subtract(_record(state), _record(one.start[0])))
  assert moved > 0
  sums = totals.sums
  # Clients without any row of use, as of FedAvg here, only receive.
  trains = float(sums['num_participants']) > 0
  assert (float(sums['backward_passes'].total) > 0) == trains
  assert float(sums['forward_passes'].total) >= float(
      sums['backward_passes'].total)
  talks = one.method.aggregate is not None
  assert bool(float(sums['models_sent'].total) > 0) == talks


@cases
def test_any_number_of_rounds_is_one_program(text, place):
  one = runner(text, place)
  halfway = one.rounds(2)
  one.rounds(1, halfway, first=2)
  assert one.run._cache_size() == 1


@cases
def test_resume_is_exact(text, place, tmp_path):
  one = runner(text, place)
  straight = one.rounds(5)
  steps = checkpoint.Checkpoints(tmp_path)
  steps.save(2, one.rounds(2))
  round_, saved = steps.restore(one.start) or (0, None)
  saved = jax.tree.map(jnp.asarray, saved)
  chex.assert_trees_all_equal(one.rounds(3, saved, first=round_), straight)


@cases
def test_hidden_labels_are_never_read(text, place):
  one = runner(text, place)
  train = one.federation.train
  wrong = jnp.where(one.hidden, (train.labels + 1) % toy.NUM_CLASSES,
                    train.labels)
  assert (wrong != train.labels).any()
  corrupted = dataclasses.replace(
      one.federation, train=train._replace(labels=wrong))
  chex.assert_trees_all_equal(one.rounds(2), one.rounds(
      2, federation=corrupted))


@pytest.mark.parametrize('text', _texts())
def test_map_without_a_norm_and_vmap_within_one_agree(text):
  """Chunks of two; a limit that nobody exceeds changes nothing."""
  one, other = runner(text, 'clients'), limited(text)
  cohort = one.of([0, 2, toy.NOBODY, 5])
  mapped, together = (x.rounds(1, federation=cohort) for x in (one, other))
  alone, padded = (float(share.total / share.rows) for share in (
      totals.sums.pop('masked_share') for _, totals in (mapped, together)))
  chex.assert_trees_all_close(mapped, together, rtol=2e-4, atol=2e-5)
  assert padded >= alone


@cases
def test_predict_gives_logits_of_every_class(text, place):
  one = runner(text, place)
  inputs = one.federation.test.inputs[:5]
  state, _ = one.rounds(2)
  def predict(state):
    if one.method.predict is None:  # Then clients have their own.
      own = one.method.local_predict
      assert own is not None
      return own(state.server, tree.take(state.memory, 0), inputs)
    return one.method.predict(state.server, inputs)
  logits = predict(state)
  chex.assert_shape(logits, (5, toy.NUM_CLASSES))
  if one.method.predict is not None:
    assert not np.allclose(logits, predict(one.start[0]))


@cases
def test_slot_order_changes_no_bit(text, place):
  one = runner(text, place)
  a = one.rounds(2, federation=one.of([0, 3, 5, 1]))
  b = one.rounds(2, federation=one.of([1, 5, 0, 3]))
  chex.assert_trees_all_equal(a, b)


@cases
def test_memory_of_an_unsampled_client_is_unchanged(text, place):
  one = runner(text, place)
  before = one.start[0].memory
  if not jax.tree.leaves(before):
    pytest.skip('keeps nothing on the clients')
  after = one.rounds(2, federation=one.of([0, 2]))[0].memory
  rest = jnp.array([1, 3, 4, 5])
  chex.assert_trees_all_equal(tree.take(before, rest), tree.take(after, rest))
  if 'keep_local' in text or text == 'local':
    with pytest.raises(AssertionError):
      chex.assert_trees_all_equal(before, after)


@cases
def test_a_client_without_rows_equals_an_absent_one(text, place):
  one = runner(text, place)
  ids = [0, toy.NOBODY, 5]
  present = one.rounds(2, federation=one.of(ids))
  absent = one.rounds(2, federation=one.of(ids, [True, False, True]))
  chex.assert_trees_all_equal(present[0], absent[0])


@cases
def test_a_broken_client_is_left_out(text, place):
  one = runner(text, place)
  state, totals = one.rounds(1, federation=one.of([0, 3, 5], broken=[3]))
  absent = one.rounds(1, federation=one.of([0, 3, 5], [True, False, True]))
  chex.assert_trees_all_equal(state, absent[0])
  chex.assert_tree_all_finite((state, totals))
  assert float(totals.sums['num_rejected']) == 1


@cases
def test_a_huge_update_is_left_out(text, place):
  """Finite, but no sum over the cohort could hold it."""
  one = runner(text, place)
  if one.method.aggregate is None:
    pytest.skip('sends nothing')
  state, totals = one.rounds(1, federation=one.of(
      [0, 3, 5], broken=[3], color=HUGE))
  absent = one.rounds(1, federation=one.of([0, 3, 5], [True, False, True]))
  chex.assert_trees_all_equal(state, absent[0])
  chex.assert_tree_all_finite((state, totals))
  assert float(totals.sums['num_rejected']) == 1


@cases
def test_a_round_of_broken_clients_changes_nothing(text, place):
  one = runner(text, place)
  state, _ = one.rounds(1, federation=one.of([3], broken=[3]))
  nobody, _ = one.rounds(1, federation=one.of([3], [False]))
  chex.assert_trees_all_equal(state, nobody)
  if place == 'clients':
    chex.assert_trees_all_equal(state._replace(round=0),
                                one.start[0]._replace(round=0))


@pytest.mark.parametrize('text', _texts())
def test_updates_beyond_the_norm_are_left_out(text):
  one = limited(text)
  state, totals = one.rounds(1, federation=one.of(
      [0, 3, 5], broken=[0, 3, 5], color=FAR))
  if one.method.aggregate is None:
    assert float(totals.sums['num_rejected']) == 0  # Nobody sends anything.
    return
  assert float(totals.sums['num_rejected']) == 3
  chex.assert_trees_all_equal(state._replace(round=0),
                              one.start[0]._replace(round=0))
