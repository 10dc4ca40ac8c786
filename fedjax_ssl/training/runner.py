"""The compiled rounds of one seed or several, and what they save."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from fedjax_ssl.core import run_files, tree
from fedjax_ssl.core.types import (
  Federation,
  Method,
  Metrics,
  PyTree,
  Ratio,
  State,
)
from fedjax_ssl.data import federation as federations_lib
from fedjax_ssl.training import client_rows, evaluate, sharding
from fedjax_ssl.training.metrics import BETWEEN


class Totals(NamedTuple):
  """Sums of the rounds' metrics since the last row."""

  sums: Metrics
  rounds: jax.Array  # float32[]


class Row(NamedTuple):
  """One evaluated round of one seed."""

  round: int
  seed: int
  values: dict[str, Any]

  def by_name(self, several: bool) -> dict[str, Any]:
    """Returns all of it by name, the seed only if there are `several`."""
    seed = {'seed': self.seed} if several else {}
    return {'round': self.round, **seed, **self.values}


def root_keys(seed: int) -> tuple[jax.Array, jax.Array]:
  """Makes the keys of a seed: for initial values, and for the rounds."""
  root = jax.random.key(seed)
  return jax.random.fold_in(root, 0), jax.random.fold_in(root, 1)


def stretch(method: Method, state: State, totals: Totals,
            federation: Federation, first: jax.Array, count: jax.Array,
            root: jax.Array) -> tuple[State, Totals]:
  """Runs `count` rounds from round `first`; counts are traced.

  Keys depend only on the seed and the round number, so a resumed run draws the
  same numbers.
  """
  def body(i, carry):
    state, totals = carry
    round_ = first + i
    # This one is of no seed, so what it decides under a vmap of seeds stays
    # one branch for all.
    state = state._replace(round=jnp.asarray(round_, jnp.int32))
    state, metrics = method.round(
        state, federation.at(round_), round_, jax.random.fold_in(root, round_))
    totals = Totals(tree.add(totals.sums, metrics), totals.rounds + 1)
    return state._replace(round=jnp.asarray(round_ + 1, jnp.int32)), totals
  return lax.fori_loop(0, count, body, (state, totals))


def state_shape(method: Method, federation: Federation) -> State:
  """Returns the shapes of a method's state, without computing its arrays."""
  # The federation is not traced: an init may make host tables of it.
  state: State = jax.eval_shape(
      lambda key: method.init(key, federation), jax.random.key(0))
  return state


def totals_shape(method: Method, federation: Any, state: Any,
                 key: jax.Array | None = None) -> Totals:
  """Returns the totals' shapes, without a round; `key` is like the round's."""
  def one(state, federation, key):  # As in `stretch`, to share its trace.
    round_ = jnp.int32(0)
    return method.round(state._replace(round=round_), federation.at(round_),
                        round_, key)
  _, metrics = jax.eval_shape(
      one, state, federation, jax.random.key(0) if key is None else key)
  metrics = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), metrics)
  rounds: Any = jax.ShapeDtypeStruct((), jnp.float32)
  return Totals(metrics, rounds)


def _to_row(round_: int, seed: int, totals: Totals, scores: Metrics) -> Row:
  """Averages the stretch and joins the evaluation."""
  totals, scores = jax.device_get((totals, scores))
  rounds = np.maximum(totals.rounds, np.float32(1))

  def mean(name, value):
    if isinstance(value, Ratio):  # NaN without rows, which becomes null.
      with np.errstate(invalid='ignore'):
        return value.total / value.rows
    return value if name in run_files.SUMMED else value / rounds
  means = {name: mean(name, v) for name, v in totals.sums.items()}
  return Row(round_, seed, {**means, **scores})


def check_names(method: Method, state: State, totals: Totals) -> None:
  """Raises ValueError for a metric named as what an evaluation gives.

  The row would have one of the two.
  """
  given = {*totals.sums}
  if method.report is not None:
    given |= {*jax.eval_shape(method.report, state.server, jnp.int32(0))}
  if taken := sorted({'round', 'seed', *evaluate.names()} & given):
    raise ValueError(f'its metric {taken[0]!r} has the name of one that an '
                     'evaluation gives; give it another.')


def checkpoint_template(method: Method, federation: Any, state: Any,
                        seeds: Sequence[int],
                        place: client_rows.Place = client_rows.ON_DEVICES
                        ) -> PyTree:
  """Returns the form of a checkpoint: each seed's state and current totals."""
  totals = totals_shape(method, federation, state)
  state = state._replace(memory=place.saved(state.memory))
  return {str(s): {'state': state, 'totals': totals} for s in seeds}


class Sequential:
  """Several seeds, one after another through one compiled program."""

  def __init__(self, method: Method, federations: Sequence[Federation],
               seeds: Sequence[int], mesh: Mesh | None):
    self._method, self._mesh, self._seeds = method, mesh, list(seeds)
    self._roots = [root_keys(s) for s in seeds]
    self._given = list(federations)  # On the host.
    self._probes = _alike([evaluate.probe_of(f) for f in federations],
                          'labeled', 'labeled_mask')
    self._program = functools.partial(stretch, method)
    self._place()
    self._states: list[State] = []
    self._totals: list[Totals] = []

  @property
  def states(self) -> list[State]:
    """The state of each seed."""
    return self._states

  def _place(self) -> None:
    self._federations = sharding.federations(self._given, self._mesh)
    self._own, self._rest, self._told = self._jitted(
        *evaluate.in_turn(self._method, self._mesh), self._of_every_round)

  def _jitted(self, *functions: Callable[..., Any]) -> list[Any]:
    """Compiles functions whose results all devices get."""
    return [jax.jit(f, out_shardings=sharding.replicated(self._mesh))
            for f in functions]

  def start(self, saved: PyTree | None) -> None:
    """Begins at a saved tree, or at the method's initial states."""
    self._states, self._totals = [], []
    seen: set[int] = set()
    for i in range(len(self._seeds)):
      state, totals = self._first(i, saved)
      state = sharding.state(state, self._mesh, seen=seen)
      if totals is None:  # With the state placed, the round is traced once.
        totals = self._zeros(i, self._federations[i], state)
      self._states.append(state)
      self._totals.append(sharding.whole(totals, self._mesh))
    self._compile(self._states[0], self._totals[0])

  def _compile(self, state: State, totals: Totals) -> None:
    """Pins the outputs where the inputs are: one compilation is enough."""
    shardings = None if self._mesh is None else jax.tree.map(
        lambda x: x.sharding, (state, totals))
    self._run = jax.jit(self._program, donate_argnums=(0, 1),
                        out_shardings=shardings)

  def _first(self, i: int, saved: PyTree | None
             ) -> tuple[State, Totals | None]:
    """Returns what was saved of a seed, or its initial state without totals."""
    if saved is not None:
      one = saved[str(self._seeds[i])]
      return one['state'], one['totals']
    return self._method.init(self._roots[i][0], self._given[i]), None

  def _zeros(self, i: int, federation: Federation, state: State) -> Totals:
    zeros: Totals = tree.zeros_like(totals_shape(
        self._method, federation, state, self._roots[i][1]))
    return zeros

  def advance(self, first: int, count: int) -> None:
    """Runs rounds [first, first + count) of every seed."""
    for i in range(len(self._seeds)):
      self._states[i], self._totals[i] = self._run(
          self._states[i], self._totals[i], self._federations[i],
          jnp.int32(first), jnp.int32(count), self._roots[i][1])
    jax.block_until_ready(self._states)

  def rows(self, round_: int) -> list[Row]:
    """Evaluates every seed and starts new totals."""
    out = [_to_row(round_, *parts) for parts in zip(
        self._seeds, self._totals_of_seeds(), self._all_scores(), strict=True)]
    self.restart_totals()
    return out

  def restart_totals(self) -> None:
    """Starts new sums of metrics."""
    self._totals = [
        sharding.whole(tree.zeros_like(t), self._mesh) for t in self._totals
    ]

  def scores(self, round_: int) -> list[Row]:
    """Evaluates every seed, without what was measured during training."""
    return [Row(round_, seed, jax.device_get(scores)) for seed, scores in zip(
        self._seeds, self._all_scores(), strict=True)]

  def reports(self, round_: int) -> list[Row]:
    """Returns each seed's report, as far as it is of every round."""
    return [Row(round_, seed, jax.device_get(
        self._report(i, jnp.int32(round_)))) for i, seed in enumerate(
            self._seeds)]

  def reports_every_round(self) -> bool:
    """Returns whether the method's report has something of every round."""
    return bool(jax.eval_shape(
        lambda round_: self._report(0, round_), jnp.int32(0)))

  def _report(self, i: int, round_: jax.Array) -> Metrics:
    """Computes what a seed's report has of every round."""
    told: Metrics = self._told(self._states[i].server, round_)
    return told

  def _of_every_round(self, server: Any, round_: jax.Array) -> Metrics:
    report = self._method.report
    found = {} if report is None else report(server, round_)
    return {name: value for name, value in found.items() if name in BETWEEN}

  def _all_scores(self) -> Iterable[Metrics]:
    """Evaluates the seeds, each when it is asked for."""
    return map(self._scores, range(len(self._seeds)))

  def _scores(self, i: int) -> Metrics:
    state, federation = self._states[i], self._federations[i]
    metrics: Metrics = self._rest(state, federation, self._probes[i],
                                  self._own(state, federation))
    return metrics

  def snapshot(self) -> PyTree:
    """Returns what a checkpoint holds; see `checkpoint_template`."""
    return {str(s): {'state': state, 'totals': totals}
            for s, state, totals in zip(self._seeds, self.states,
                                        self._totals_of_seeds(), strict=True)}

  def _totals_of_seeds(self) -> list[Totals]:
    return self._totals

  def kept(self) -> None:
    """Hears that the newest snapshot is written."""


def _alike(probes: Sequence[evaluate.Probe], *names: str
           ) -> list[evaluate.Probe]:
  """Pads some fields of several seeds' probes to one shape: one program."""
  def padded(name):
    parts = [getattr(probe, name) for probe in probes]
    shape = np.max([x.shape for x in parts], axis=0)
    def pad(x):
      # A client's rows again: a method may judge a batch by all that is in it.
      mode: Any = 'wrap' if name == 'rows' and x.size else 'constant'
      sides = [(0, n - m) for n, m in zip(shape, x.shape, strict=True)]
      return np.pad(x, sides, mode)
    return [*map(pad, parts)]
  return [probe._replace(**dict(zip(names, fields, strict=True)))
          for probe, *fields in zip(probes, *map(padded, names), strict=True)]


class Together(Sequential):
  """Several seeds under one vmap; states carry a leading axis of seeds.

  What is of one seed is cut out when it is asked for: it is a copy, and a state
  may hold what all clients keep.
  """

  @property
  def states(self) -> list[State]:
    """The state of each seed, a copy."""
    return [tree.take(self._state, i) for i in range(len(self._seeds))]

  def _place(self):
    stacked = federations_lib.stack(self._given)
    axes = federations_lib.seed_axes(stacked)
    self._stacked, = sharding.federations([stacked], self._mesh, axis=1)
    self._rounds_keys = jnp.stack([key for _, key in self._roots])
    self._program = jax.vmap(self._program,
                             in_axes=(0, 0, axes, None, None, 0))
    own, rest = evaluate.in_turn(self._method, self._mesh)
    self._own, self._rest, self._told = self._jitted(
        jax.vmap(own, in_axes=(0, axes)),
        jax.vmap(rest, in_axes=(0, axes, 0, 0)),
        lambda server, i, round_: self._of_every_round(
            tree.take(server, i), round_))
    self._probe = evaluate.Probe(*map(np.stack, zip(
        *_alike(self._probes, *evaluate.Probe._fields), strict=True)))

  def start(self, saved):
    """Like `Sequential.start`, then stacks the states on a leading axis."""
    pairs = []
    for i, given in enumerate(self._given):
      state, totals = self._first(i, saved)
      pairs.append((state, self._zeros(i, given, state)
                    if totals is None else totals))
    state, totals = jax.tree.map(lambda *xs: np.stack(xs), *pairs)
    self._state = sharding.state(state, self._mesh, axis=1)
    self._total = sharding.whole(totals, self._mesh)
    self._compile(self._state, self._total)

  def advance(self, first, count):
    """Runs rounds [first, first + count) of all seeds at once."""
    self._state, self._total = self._run(
        self._state, self._total, self._stacked, jnp.int32(first),
        jnp.int32(count), self._rounds_keys)
    jax.block_until_ready(self._state)

  def _all_scores(self):
    """Evaluates all seeds at once."""
    scores = self._rest(self._state, self._stacked, self._probe,
                        self._own(self._state, self._stacked))
    return [tree.take(scores, i) for i in range(len(self._seeds))]

  def restart_totals(self):
    """Starts new sums of metrics."""
    self._total = sharding.whole(tree.zeros_like(self._total), self._mesh)

  def _report(self, i, round_):
    return self._told(self._state.server, jnp.int32(i), round_)

  def _totals_of_seeds(self):
    return [tree.take(self._total, i) for i in range(len(self._seeds))]
