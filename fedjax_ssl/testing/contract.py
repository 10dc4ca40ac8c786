"""The laws that every method holds, each a function of a `CohortRunner`.

A law raises AssertionError if it does not hold, and `Skip` if it does not apply
to a method.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import functools
import itertools
import pathlib
import tempfile
from typing import Any, NamedTuple
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import methods
from fedjax_ssl.core import noting, run_files, sampling, tree
from fedjax_ssl.core.types import (
  Cohort,
  Context,
  Federation,
  Method,
  Ratio,
  Task,
  Update,
)
from fedjax_ssl.data import batching
from fedjax_ssl.methods.parts import labeled_clients
from fedjax_ssl.testing import keys, toy, traces
from fedjax_ssl.training import checkpoint, metrics
from fedjax_ssl.training import runner as runner_lib

# Colors of clients that break: to NaN, to a huge message, or beyond `NORM`.
WHITE, HUGE, FAR = 255, 254, 253
NORM = 1e6  # No client of the toy federation gets as far by training.

Make = Callable[[Task], Method]
Law = Callable[['CohortRunner'], None]


class Skip(Exception):
  """The law does not apply to this method; the message says why."""


class Runner:
  """A method on the toy federation, compiled once."""

  def __init__(self, make: Make, model: str, place: str, **changes: Any):
    """Makes the method and its first state.

    Args:
      make: (task) -> the method.
      model: of `toy.task`.
      place: where labels live, 'clients' or 'server'.
      **changes: of the task.
    """
    self.place = place
    self.federation, self.hidden = toy.federation(place)
    method = make(toy.task(model, labels_at=place, **changes))
    # Traced once for the shapes of its metrics and for the run.
    self.method = method._replace(round=jax.jit(method.round))
    self.run: Any = jax.jit(functools.partial(runner_lib.stretch, self.method))
    self.init_key, self.root = jax.random.split(keys.key(3))
    state = self.method.init(self.init_key, self.federation)
    totals = tree.zeros_like(
        runner_lib.totals_shape(self.method, self.federation, state, self.root))
    self.start = jax.device_put((state, totals))

  def rounds(self, count: int, start: Any = None, first: int = 0,
             federation: Federation | None = None) -> Any:
    """Returns (state, totals) after `count` rounds from round `first`."""
    return self.run(*(start or self.start), federation or self.federation,
                    jnp.int32(first), jnp.int32(count), self.root)


class _Closing(NamedTuple):
  """What a server does with the updates of all slots.

  Attributes:
    aggregate: of a pass that is handed more than the mean of the messages.
    updates: shapes of what it is handed.
    cohort: shapes of the slots.
  """

  aggregate: noting.Aggregate
  updates: Update
  cohort: Cohort


class CohortRunner(Runner):
  """A runner that is told who takes part: one program for every cohort.

  Rounds never read the test set, so its labels can carry the cohort. Batches
  are filled up with the last row of the training set, which has no owner.

  Attributes:
    is_told: whether the method draws its cohorts by `core.sampling.groups`.
    can_break: whether its clients work in `core.rounds.client_pass`.
    closings: by pass, what its server does with updates slot by slot.
    anew: () -> the same runner, made once more.
  """

  SIZE = 4

  def __init__(self, make: Make, model: str, place: str, **changes: Any):
    """See `Runner`."""
    self.anew = functools.partial(CohortRunner, make, model, place, **changes)
    self.is_told = self.can_break = False
    self.closings: dict[int, _Closing] = {}
    passes = itertools.count()
    def watched(aggregate: noting.Aggregate) -> noting.Aggregate:
      number = next(passes)
      def told(server: Any, updates: Any, cohort: Any, *rest: Any) -> Any:
        self.closings[number] = _Closing(
            aggregate, *jax.eval_shape(lambda: (updates, cohort)))
        return aggregate(server, updates, cohort, *rest)
      return told
    def sample(state: Any, federation: Any, key: Any) -> Cohort:
      del state, key
      self.is_told = True
      told = federation.test.labels[:2 * self.SIZE].reshape(1, 2, self.SIZE)
      return Cohort(told[:, 0], told[:, 1] > 0)
    with (noting.passes(_breakable, watched) as noted,
          mock.patch.object(sampling, 'groups', lambda number, size: sample),
          mock.patch.object(labeled_clients, 'after_warmup',
                            lambda told, rounds: told),
          mock.patch.object(batching, 'gather', _filled_up)):
      super().__init__(make, model, place, **changes)
    self.can_break = bool(noted.samplers)
    # Rows of both kinds, labels alone, others alone, and both again.
    self.federation = self.of([0, 1, 2, 5])

  def of(self, ids: Sequence[int], active: Sequence[bool] | None = None,
         broken: Sequence[int] = (), color: int = WHITE) -> Federation:
    """Returns the federation of a cohort; `broken` clients have one color."""
    active = [True] * len(ids) if active is None else active
    rest = [0] * (self.SIZE - len(ids))
    told = [*ids, *rest, *active, *rest]
    out = self.federation
    for client in broken:
      out = _break(out, client, color)
    labels = np.array(out.test.labels)  # Nothing to compile.
    labels[:len(told)] = told
    return dataclasses.replace(
        out, test=out.test._replace(labels=jnp.asarray(labels)))


_gather = batching.gather


def _filled_up(examples: Any, rows: Any, mask: Any, **knobs: Any) -> Any:
  """batching.gather with the last row wherever the mask is 0."""
  last = examples.labels.shape[0] - 1
  return _gather(examples, jnp.where(mask > 0, rows, last), mask, **knobs)


def _breakable(client_update: noting.ClientUpdate) -> noting.ClientUpdate:
  """A client's update that breaks if its first image is of one color.

  It gives NaN if it is `WHITE`, a huge message if `HUGE`, and one beyond
  `NORM` if `FAR`.
  """
  def update(payload: Any, client: Any, key: Any) -> Any:
    shard = client.shard
    first = jnp.where(shard.num_labeled > 0, shard.labeled[0],
                      shard.unlabeled[0])
    white, huge, far = ((client.train.inputs[first] == color).all()
                        for color in (WHITE, HUGE, FAR))
    spoil = jnp.where(white, jnp.nan, 0.0)
    made = client_update(payload, client, key)
    def add(x: Any, spoil: Any) -> Any:
      return (x + spoil).astype(x.dtype) if jnp.issubdtype(
          x.dtype, jnp.floating) else x
    moved = jnp.where(huge, 3e38, jnp.where(far, 2 * NORM, spoil))
    return made._replace(
        message=jax.tree.map(lambda x: add(x, moved), made.message),
        memory=jax.tree.map(lambda x: add(x, spoil), made.memory))
  return update


def _break(federation: Federation, client: int, color: int) -> Federation:
  """Makes a client's images white, or of another color."""
  shard = _rows(federation.clients, client)
  inputs = np.array(federation.train.inputs)
  inputs[shard.labeled[:shard.num_labeled]] = color
  inputs[shard.unlabeled[:shard.num_unlabeled]] = color
  return dataclasses.replace(federation, train=federation.train._replace(
      inputs=jnp.asarray(inputs)))


def _rows(stacked: Any, rows: Any) -> Any:
  return jax.tree.map(lambda x: np.asarray(x)[rows], stacked)


def _record(state: Any) -> Any:
  """All numbers of a state but its clock."""
  return jax.tree.map(np.asarray, (state.server, state.memory))


def _needs_told(one: CohortRunner) -> None:
  if not one.is_told:
    raise Skip('it draws its cohorts in a way of its own')


def _needs_broken(one: CohortRunner) -> None:
  _needs_told(one)
  if not one.can_break:
    raise Skip('its clients do not work in core.rounds.client_pass')


def state_keeps_its_form_and_metrics_are_finite(one: CohortRunner) -> None:
  """State keeps structure, shapes and dtypes; state and metrics are finite."""
  state, totals = one.rounds(3)
  chex.assert_trees_all_equal_shapes_and_dtypes(state, one.start[0])
  chex.assert_tree_all_finite((state, totals))
  assert int(state.round) == 3 and float(totals.rounds) == 3
  whole = {k for k, v in totals.sums.items() if isinstance(v, Ratio)}
  row = {name: value / (1 if name in {*whole, *run_files.SUMMED} else 3)
         for name, value in toy.means(totals.sums).items()}
  metrics.validate(metrics.to_plain({'round': 3, **row}))
  moved = jax.tree.map(np.not_equal, *map(_record, (state, one.start[0])))
  assert any(x.any() for x in jax.tree.leaves(moved)), 'nothing is learnt'
  sums = totals.sums
  # Clients without rows that the method uses, as in FedAvg here, only receive.
  if 'backward_passes' in sums:
    trains = float(sums['num_participants']) > 0
    assert (float(sums['backward_passes'].total) > 0) == trains
    # Two gradients may share a pass forward.
    assert 2 * float(sums['forward_passes'].total) >= float(
        sums['backward_passes'].total)
  talks = one.method.aggregate is not None
  assert bool(float(sums['models_sent'].total) > 0) == talks


def any_number_of_rounds_is_one_program(one: CohortRunner) -> None:
  """One compilation serves the whole run, whatever the pieces it comes in."""
  halfway = one.rounds(2)
  one.rounds(1, halfway, first=2)
  assert one.run._cache_size() == 1


def no_key_is_used_twice(one: CohortRunner) -> None:
  """No two draws of a round have one PRNG key, and so the same numbers."""
  with jax.debug_key_reuse(True):
    try:
      jax.eval_shape(one.method.round, one.start[0], one.federation,
                     jnp.int32(0), one.root)
    except jax.errors.KeyReuseError as error:
      raise AssertionError(
          'A key is used again after random numbers were drawn from it, or '
          'after it was split. Split it once, and give each draw a part: '
          f'{error}') from error


def resume_is_exact(one: CohortRunner) -> None:
  """n rounds are k rounds, a checkpoint and n - k rounds, bit for bit."""
  straight = one.rounds(5)
  with tempfile.TemporaryDirectory() as folder:
    steps = checkpoint.Checkpoints(pathlib.Path(folder) / 'steps')
    steps.save(2, one.rounds(2))
    round_, saved = steps.restore(one.start) or (0, None)
    saved = jax.device_put(saved)
  chex.assert_trees_all_equal(one.rounds(3, saved, first=round_), straight)


def made_anew_it_is_the_same(one: CohortRunner) -> None:
  """A process that continues a run, and makes the method again, goes on so."""
  def traced(runner: CohortRunner) -> traces.Trace:
    return traces.of(runner.method.round, runner.start[0], runner.federation,
                     jnp.int32(0), runner.root)
  assert traces.are_equal(traced(one), traced(one.anew())), (
      'Made anew, the round computes something else, as it does in a run that '
      'is continued. Draw numbers by jax.random from the key that is handed '
      'over, not by random or numpy.random, and keep nothing outside the '
      'state.')


def hidden_labels_are_never_read(one: CohortRunner) -> None:
  """Other labels where the setting hides them change nothing."""
  train = one.federation.train
  wrong = jnp.where(one.hidden, (train.labels + 1) % toy.NUM_CLASSES,
                    train.labels)
  assert (wrong != train.labels).any()
  corrupted = dataclasses.replace(
      one.federation, train=train._replace(labels=wrong))
  chex.assert_trees_all_equal(one.rounds(2), one.rounds(
      2, federation=corrupted))


def masked_rows_are_never_learnt_from(one: CohortRunner) -> None:
  """What fills up a batch, where the mask is 0, changes nothing."""
  train = one.federation.train
  inputs, labels = map(jnp.asarray, train)
  other = train._replace(
      inputs=inputs.at[-1].set(255 - inputs[-1]),
      labels=labels.at[-1].set((labels[-1] + 1) % toy.NUM_CLASSES))
  before, after = (jax.tree.leaves(one.rounds(2, federation=federation))
                   for federation in (one.federation, dataclasses.replace(
                       one.federation, train=other)))
  assert all(map(np.array_equal, before, after)), (
      'Other rows in their place give another result. Every mean, sum or '
      'maximum over the rows of batch.labeled or batch.unlabeled must leave '
      'out those of mask 0, as losses.masked_mean does.')


def predict_gives_logits_of_every_class(one: CohortRunner) -> None:
  """`predict` returns [B, classes], others than before training."""
  inputs = one.federation.test.inputs[:5]
  state, _ = one.rounds(2)
  def predict(state: Any) -> Any:
    if one.method.predict is None:  # Then clients have their own.
      own = one.method.local_predict
      assert own is not None
      return own(state.server, tree.take(state.memory, 0), inputs)
    return one.method.predict(state.server, inputs)
  logits = predict(state)
  chex.assert_shape(logits, (5, toy.NUM_CLASSES))
  if one.method.predict is not None:
    assert not np.allclose(logits, predict(one.start[0]))


def slot_order_changes_no_bit(one: CohortRunner) -> None:
  """The order of the clients in a cohort changes no bit."""
  _needs_told(one)
  a = one.rounds(2, federation=one.of([0, 3, 5, 1]))
  b = one.rounds(2, federation=one.of([1, 5, 0, 3]))
  chex.assert_trees_all_equal(a, b)


def memory_of_an_unsampled_client_is_unchanged(one: CohortRunner) -> None:
  """What stays on a client changes only where it takes part."""
  _needs_told(one)
  before = one.start[0].memory
  if not jax.tree.leaves(before):
    raise Skip('keeps nothing on the clients')
  after = one.rounds(2, federation=one.of([0, 2]))[0].memory
  rest = np.array([1, 3, 4, 5])
  chex.assert_trees_all_equal(_rows(before, rest), _rows(after, rest))


def a_client_without_rows_equals_an_absent_one(one: CohortRunner) -> None:
  """A client that has no rows changes nothing."""
  _needs_told(one)
  ids = [0, toy.NOBODY, 5]
  present = one.rounds(2, federation=one.of(ids))
  absent = one.rounds(2, federation=one.of(ids, [True, False, True]))
  chex.assert_trees_all_equal(present[0], absent[0])


def a_broken_client_is_left_out(one: CohortRunner) -> None:
  """A client that sends NaN equals an absent one, and is counted."""
  _needs_broken(one)
  state, totals = one.rounds(1, federation=one.of([0, 3, 5], broken=[3]))
  absent = one.rounds(1, federation=one.of([0, 3, 5], [True, False, True]))
  chex.assert_trees_all_equal(state, absent[0])
  chex.assert_tree_all_finite((state, totals))
  assert float(totals.sums['num_rejected']) == 1


def a_huge_update_is_left_out(one: CohortRunner) -> None:
  """A client whose finite update would overflow a sum equals an absent one."""
  _needs_broken(one)
  if one.method.aggregate is None:
    raise Skip('sends nothing')
  state, totals = one.rounds(1, federation=one.of(
      [0, 3, 5], broken=[3], color=HUGE))
  absent = one.rounds(1, federation=one.of([0, 3, 5], [True, False, True]))
  chex.assert_trees_all_equal(state, absent[0])
  chex.assert_tree_all_finite((state, totals))
  assert float(totals.sums['num_rejected']) == 1


def a_round_of_broken_clients_changes_nothing(one: CohortRunner) -> None:
  """A round in which every client is broken changes nothing."""
  _needs_broken(one)
  state, _ = one.rounds(1, federation=one.of([3], broken=[3]))
  nobody, _ = one.rounds(1, federation=one.of([3], [False]))
  chex.assert_trees_all_equal(state, nobody)
  if one.place == 'clients':
    chex.assert_trees_all_equal(state._replace(round=0),
                                one.start[0]._replace(round=0))


def a_slot_of_weight_0_equals_none(one: CohortRunner) -> None:
  """The server's record is the same with a slot whose update is not used."""
  closings = [closing for closing in one.closings.values()
              if closing.cohort.ids.shape[1] > 1]
  if not closings:
    raise Skip("its server is handed the mean of the clients' updates alone")
  why = 'made-up updates change nothing in its server'
  compared = False
  for closing in closings:
    try:
      # Small ones for a rule that leaves out what is far off.
      compared |= any(_compare_slots(one, closing, scale)
                      for scale in (1.0, 1e-4))
    except jax.errors.UnexpectedTracerError:
      why = 'its aggregation uses what is traced with the round'
  if not compared:
    raise Skip(why)


def _compare_slots(one: CohortRunner, closing: _Closing, scale: float) -> bool:
  """Compares made-up updates with the same and a slot that is not used.

  Messages are of about this scale. Returns whether the updates change a number
  of the server's record at all.
  """
  num_groups, size = closing.cohort.ids.shape
  draw = np.random.default_rng(0)
  # Messages have any sign; counts and weights do not.
  made = _made_up(closing.updates, draw, .5)._replace(message=jax.tree.map(
      lambda x: (scale * x).astype(x.dtype),
      _made_up(closing.updates.message, draw, -1.5)))
  ids = jnp.arange(num_groups * size).reshape(num_groups, size)
  slots = (made, Cohort(
      ids % one.federation.num_clients, jnp.ones(ids.shape, bool)))
  used = jax.tree.map(lambda x: x[:, 1:], slots)
  unused = jax.tree.map(lambda x: jnp.zeros_like(x[:, :1]), slots)
  there, server = one.federation, one.start[0].server
  run = jax.jit(lambda slots: closing.aggregate(
      server, *slots, Context(jnp.int32(1), there.train, there.validation,
                              there.server), one.root)[0])
  without = run(used)
  for place in {0, 1, size - 1}:
    with_one = run(jax.tree.map(lambda x, y, place=place: jnp.concatenate(
        [x[:, :place], y, x[:, place:]], axis=1), used, unused))
    for x, y in zip(*map(jax.tree.leaves, (with_one, without)), strict=True):
      # What a method computes of made-up statistics may be no number, as
      # FedMatch's guesses of a model with negative variances.
      assert np.allclose(x, y, rtol=1e-4, atol=1e-6, equal_nan=True), (
          'An update of weight 0 changes what becomes of the others, as in a '
          'plain mean of all slots. Leave out, or count by their weights, the '
          'updates that an aggregation gets.')
  return any(np.isfinite(x).all() and not np.array_equal(x, before)
             for x, before in zip(*map(jax.tree.leaves, (without, server)),
                                  strict=True))


def _made_up(shapes: Any, draw: np.random.Generator, least: float) -> Any:
  """Returns numbers of these shapes: floats from `least` to 1.5, and ones."""
  return jax.tree.map(
      lambda x: jnp.asarray(draw.uniform(least, 1.5, x.shape), x.dtype)
      if jnp.issubdtype(x.dtype, jnp.floating) else jnp.ones(x.shape, x.dtype),
      shapes)


def report_is_numbers_by_name(one: CohortRunner) -> None:
  """`report` takes the server's record and the round, and gives numbers."""
  if one.method.report is None:
    raise Skip('reports nothing')
  try:
    methods.check_report(one.method, one.start[0].server)
  except ValueError as error:
    raise AssertionError(str(error)) from error


LAWS: dict[str, Law] = {law.__name__: law for law in (
    state_keeps_its_form_and_metrics_are_finite,
    any_number_of_rounds_is_one_program,
    masked_rows_are_never_learnt_from,
    hidden_labels_are_never_read,
    predict_gives_logits_of_every_class,
    report_is_numbers_by_name,
    slot_order_changes_no_bit,
    memory_of_an_unsampled_client_is_unchanged,
    a_client_without_rows_equals_an_absent_one,
    a_broken_client_is_left_out,
    a_huge_update_is_left_out,
    a_round_of_broken_clients_changes_nothing,
    a_slot_of_weight_0_equals_none,
    resume_is_exact,
    made_anew_it_is_the_same,
    no_key_is_used_twice)}
