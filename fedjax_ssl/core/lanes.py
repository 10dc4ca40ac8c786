"""Lanes: clients that share one vmap without waiting for a longer one.

Under a plain vmap a chunk of clients takes as long as its longest. A lane takes
the next client as soon as its own is done. For this a client's computation is
cut at its loop over local steps, `STEPS`: into what precedes the loop, one
step, and what follows. What depends on no client, such as a teacher's weights,
is computed once for all.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp

from fedjax_ssl.core import tree
from fedjax_ssl.core.common_expressions import evaluate
from fedjax_ssl.core.types import PyTree

# The scope that names a client's loop over its local steps.
STEPS = 'local_steps'

Values = dict[Any, Any]  # By variable of a jaxpr.


class Lane(NamedTuple):
  """A client that is being trained; of several, leaves are [K, ...]."""

  constants: list[Any]  # What its steps read.
  carry: list[Any]  # What they change.
  kept: list[Any]  # What comes from before the loop and is used after it.


class Cut(NamedTuple):
  """A client's computation `body(shared, slot)`, cut at its loop."""

  form: Any  # The tree structure of its result.
  results: Sequence[Any]  # Its result's variables.
  slot: Sequence[Any]  # The variables of a slot.
  common: Values  # What depends on no slot.
  before: Sequence[Any]  # Equations before the loop that it needs.
  loop: Any  # The loop's equation, or None without one.
  after: Sequence[Any]  # All other equations.
  kept: Sequence[Any]  # Variables from `before` that are read after the loop.

  def start(self, slot: PyTree) -> Lane:
    """Returns a client before its first step."""
    values = self._with(slot)
    evaluate(self.before, values)
    constants, carry = ([], []) if self.loop is None else (
        self._own(self._constants()), self.loop.invars[self._num_constants():])
    return Lane(*([_read(x, values) for x in variables]
                  for variables in (constants, carry, self.kept)))

  def goes_on(self, lane: Lane) -> jax.Array:
    """Returns bool[]: whether there is a step left."""
    return self._part('cond', lane)[0]

  def step(self, lane: Lane) -> Lane:
    """Returns a client after its next step."""
    return lane._replace(carry=self._part('body', lane))

  def finish(self, slot: PyTree, lane: Lane) -> Any:
    """Returns the result of a client that has taken all its steps."""
    values = self._with(slot)
    values.update(zip(self.kept, lane.kept, strict=True))
    if self.loop is not None:
      values.update(zip(self.loop.outvars, lane.carry, strict=True))
    evaluate(self.after, values)
    return jax.tree.unflatten(
        self.form, [_read(x, values) for x in self.results])

  def _with(self, slot: PyTree) -> Values:
    return self.common | dict(
        zip(self.slot, jax.tree.leaves(slot), strict=True))

  def _num_constants(self) -> int:
    params = self.loop.params
    return params['cond_nconsts'] + params['body_nconsts']

  def _constants(self) -> Sequence[Any]:
    """What the loop reads: its condition's constants, then its body's."""
    return self.loop.invars[:self._num_constants()]

  def _own(self, variables: Iterable[Any]) -> list[Any]:
    """Those that depend on the slot."""
    return [x for x in variables
            if not isinstance(x, core.Literal) and x not in self.common]

  def _part(self, name: str, lane: Lane) -> list[Any]:
    """Evaluates the loop's condition ('cond') or its 'body'."""
    own = dict(zip(self._own(self._constants()), lane.constants, strict=True))
    constants = [_read(x, self.common | own) for x in self._constants()]
    params, first = self.loop.params, self.loop.params['cond_nconsts']
    mine = constants[:first] if name == 'cond' else constants[first:]
    jaxpr = params[f'{name}_jaxpr']
    return core.jaxpr_as_fun(jaxpr)(*mine, *lane.carry)


def cut(body: Callable[..., Any], shared: PyTree, slot: PyTree) -> Cut:
  """Cuts `body(shared, slot)` at its last loop in the scope `STEPS`.

  It does not cut loops before that one, such as a pass that labels rows, nor
  loops inside of branches: all lanes wait while one goes through these. Without
  any loop there are no steps: clients are computed one after another.

  Args:
    body: what `common_expressions.merge_equal` returned, whose expressions are
      all on one level.
    shared: what all clients see.
    slot: of one client; only its shapes are used.
  """
  closed, shape = jax.make_jaxpr(body, return_shape=True)(shared, slot)
  jaxpr, given = closed.jaxpr, jax.tree.leaves(shared)
  loop = next((eqn for eqn in reversed(jaxpr.eqns) if _is_loop(eqn)), None)
  common: Values = dict(zip(
      [*jaxpr.constvars, *jaxpr.invars[:len(given)]],
      [*closed.consts, *given], strict=True))
  rest = [eqn for eqn in jaxpr.eqns if eqn is not loop]
  wanted = [] if loop is None else loop.invars
  # Of what depends on no client, only what the loop needs is computed here. The
  # other expressions stay together, so that they are rounded as without lanes.
  for eqn in _split(rest, wanted)[0]:
    if not eqn.effects and _inputs([eqn]) <= common.keys():
      evaluate([eqn], common)
  own = [eqn for eqn in rest
         if eqn.effects or not common.keys() >= {*eqn.outvars}]
  before, after = _split(own, wanted)
  made = [x for eqn in before for x in eqn.outvars]
  read = _inputs(after) | set(_variables(jaxpr.outvars))
  return Cut(jax.tree.structure(shape), jaxpr.outvars,
             jaxpr.invars[len(given):], common, before, loop, after,
             [x for x in made if x in read])


def _is_loop(eqn: Any) -> bool:
  scopes = str(eqn.source_info.name_stack).split('/')
  return eqn.primitive.name == 'while' and STEPS in scopes


def _variables(atoms: Iterable[Any]) -> list[Any]:
  return [x for x in atoms if not isinstance(x, core.Literal)]


def _inputs(eqns: Iterable[Any]) -> set[Any]:
  return {x for eqn in eqns for x in _variables(eqn.invars)}


def _split(eqns: Sequence[Any], wanted: Iterable[Any]
           ) -> tuple[list[Any], list[Any]]:
  """Returns the equations that `wanted` variables need, and the others."""
  needed, before, after = set(_variables(wanted)), [], []
  for eqn in reversed(eqns):
    if needed.isdisjoint(eqn.outvars):
      after.append(eqn)
    else:
      before.append(eqn)
      needed.update(_variables(eqn.invars))
  return before[::-1], after[::-1]


def _read(atom: Any, values: Mapping[Any, Any]) -> Any:
  if not isinstance(atom, core.Literal):
    return values[atom]
  kind: Any = atom.aval
  return jnp.asarray(atom.val, kind.dtype)


def run(one: Cut, slots: Any, width: int,
        take: Callable[[PyTree, Any, jax.Array], PyTree], out: PyTree
        ) -> PyTree:
  """Trains all clients in `width` lanes.

  The loop ends by a condition on its state, not after a fixed number of steps.
  How many it takes depends on who was drawn, and a number that is enough for
  every draw is that of the longest clients, which takes as long as no lanes. A
  device reads one bool a step for it.

  Args:
    one: a client's computation.
    slots: [S, ...], taken in this order.
    width: K, at least 1. A single lane needs no vmap: its bits are those of
      clients that run one after another.
    take: (out, result, place int32[]) -> out, which takes in a client that is
      done.
    out: what `take` is given first.

  Returns:
    `out` with every client taken in.
  """
  size = jax.tree.leaves(slots)[0].shape[0]
  if one.loop is None:
    def all_of(place: Any, out: PyTree) -> PyTree:
      slot = tree.take(slots, place)
      return take(out, one.finish(slot, one.start(slot)), place)
    return lax.fori_loop(0, size, all_of, out)
  width = min(width, size)
  together: Callable[..., Any] = jax.vmap if width > 1 else _alone
  goes_on, step = together(one.goes_on), together(one.step)

  def of(places: jax.Array) -> Any:
    return tree.take(slots, jnp.minimum(places, size - 1))

  def done(state: Any) -> jax.Array:
    lanes, places, *_ = state
    return ~goes_on(lanes) & (places < size)

  def follow(state: Any) -> Any:
    """Gives one lane that is done its next client; leaves the others alone."""
    lanes, places, following, out = state
    which = done(state).argmax()
    place = places[which]
    out = take(out, one.finish(of(place), _row(lanes, which)), place)
    lanes = jax.tree.map(lambda x, new: x.at[which].set(new), lanes,
                         one.start(of(following)))
    return lanes, places.at[which].set(following), following + 1, out

  def advance(state: Any) -> Any:
    lanes, *rest = lax.while_loop(
        lambda state: done(state).any(), follow, state)
    # At the very end this takes one step for no client. Otherwise the loop
    # above would be needed a second time, before the first step.
    after = step(lanes)
    if width > 1:
      after = jax.vmap(tree.where)(goes_on(lanes), after, lanes)
    return after, *rest

  places = jnp.arange(width, dtype=jnp.int32)
  state = together(one.start)(of(places)), places, jnp.int32(width), out
  return lax.while_loop(
      lambda state: (state[1] < size).any(), advance, state)[-1]


def _row(lanes: Lane, which: jax.Array) -> Lane:
  return jax.tree.map(lambda x: x[which], lanes)


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
  """A function of [1, ...] that runs without an axis."""
  def one(*args: Any) -> Any:
    return jax.tree.map(lambda x: x[None], function(
        *jax.tree.map(lambda x: x[0], args)))
  return one


def longest(steps: jax.Array, width: int) -> jax.Array:
  """Computes how many steps the busiest lane takes: how long all lanes work.

  Args:
    steps: float32[S], of each client, in the order in which they are taken.
    width: K.
  """
  def take(i: jax.Array, load: jax.Array) -> jax.Array:
    return load.at[load.argmin()].add(steps[i])
  return lax.fori_loop(0, steps.shape[0], take, jnp.zeros(width)).max()
