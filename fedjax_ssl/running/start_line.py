"""The line with which every run starts.

Method, data, clients and devices on one line. Functions in `NOTES` add
warnings, such as a knob value that turns part of a method off.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import os
import pathlib
from typing import Any, TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import data
from fedjax_ssl import task as task_lib
from fedjax_ssl.config import FieldError
from fedjax_ssl.core import checks, descriptions, noting, optimizers, registry
from fedjax_ssl.core.types import Shard
from fedjax_ssl.methods.parts import aggregators, private_labels
from fedjax_ssl.running import settings
from fedjax_ssl.training import environment, runner

if TYPE_CHECKING:
  from fedjax_ssl.running.job import Job

# A cosine of a million rounds ends at 2e-12 of the rate; of longer runs nobody
# asks where their schedule ends.
_ZERO, _MOST_ROUNDS = 1e-12, 1_000_000
_FEW_TO_VALIDATE = 20  # An accuracy moves in steps of over 5 points.


def text(job: Job, done: int) -> str:
  """Returns the line with which a run starts.

  Args:
    job: a `job.Job`.
    done: rounds that an earlier start has done.
  """
  dealt = [data.describe(federation) for federation in job.federations]
  total = dealt[0]['num_clients']
  at_server = _span(facts['server_labeled'] for facts in dealt)
  labeled = at_server if job.options.labels_at == 'server' else _span(
      facts['labeled']['total'] for facts in dealt)
  unlabeled = _span(facts['unlabeled']['total'] for facts in dealt)
  place = ' (at the server)' if job.options.labels_at == 'server' else ''
  devices = 1 if job.mesh is None else job.mesh.size
  parts = [
      job.options.dataset,
      f'{descriptions.count(total, "client")}, {_cohorts(job)} a round',
      f'{labeled} labeled{place} and {unlabeled} unlabeled rows',
      f'{_held_out(dealt)} rows',
      descriptions.count(dealt[0]['num_classes'], 'class', 'classes'),
      descriptions.count(job.num_parameters, 'parameter'),
      _devices(devices),
      f'{_steps(job)} steps a client and round']
  if len(job.seeds) > 1:
    parts.append(descriptions.count(len(job.seeds), 'seed'))
  parts += [said for note in NOTES if (said := note(job))]
  begins = f'continues at round {done}' if done else 'starts'
  return f'{job.name} {begins}: {"; ".join(parts)}.'


def _held_out(dealt: Sequence[Mapping[str, Any]]) -> str:
  """Rows that no client has: `360 test`, or `360 test and 40 validation`."""
  sizes = {kind: _span(facts[f'num_{kind}'] for facts in dealt)
           for kind in ('test', 'validation')}
  return ' and '.join(f'{size} {kind}' for kind, size in sizes.items()
                      if kind == 'test' or size != '0')


def _devices(number: int) -> str:
  """Names what a run is on: JAX takes a CPU where it cannot start a GPU."""
  first = environment.devices()[0]
  if first.platform == 'cpu':
    return descriptions.count(number, 'CPU device')
  return f'{number:,} x {first.device_kind}'


def _cohorts(job: Job) -> str:
  """Clients of a round, `5` or `3 groups of 5`; for each pass that differs."""
  return ' + '.join(dict.fromkeys(
      f'{size:,}' if groups == 1 else f'{groups:,} groups of {size:,}'
      for groups, size in job.cohorts)) or 'none'


def _steps(job: Job) -> str:
  """Local steps of the clients that take any; a plus joins several passes."""
  return ' + '.join(_span(_steps_of(job, work)) or '0' for work in job.works)


def is_idle(job: Job) -> bool:
  """Returns whether no client ever takes a step, as far as its method says."""
  return bool(job.works) and not any(_steps_of(job, w) for w in job.works)


def _steps_of(job: Job, work: noting.Work) -> list[int]:
  """Steps of a pass, of each client that takes any, in all federations."""
  run = jax.jit(jax.vmap(work))
  return [step for f in job.federations for step in _of_clients(run, f.tables)]


def _of_clients(run: noting.Work, shards: Shard) -> list[int]:
  """Steps of each client that takes any, for each task of a stream.

  `run` counts those of shards on a leading axis.
  """
  lead = np.shape(shards.num_labeled)
  flat = jax.tree.map(
      lambda leaf: np.reshape(leaf, (-1, *np.shape(leaf)[len(lead):])), shards)
  steps = np.asarray(run(flat))
  return [int(step) for step in steps if step > 0]


def _span(numbers: Iterable[int]) -> str:
  """`1,200`, or `3 to 12`; '' without numbers."""
  found = sorted(set(numbers))
  return ' to '.join(f'{n:,}' for n in dict.fromkeys(found[:1] + found[-1:]))


def _unseen(job: Job, devices: pathlib.Path = pathlib.Path('/dev')) -> str:
  """Says that JAX took the CPU, unasked, although there is a GPU; else ''.

  JAX only logs why: its build may lack CUDA, or variables may contradict.
  """
  del job
  asked = (jax.config.values['jax_platforms']
           or os.environ.get('JAX_PLATFORM_NAME')
           or os.environ.get('CUDA_VISIBLE_DEVICES') in ('', '-1'))
  if asked or environment.devices()[0].platform != 'cpu':
    return ''
  return ('JAX does not see the NVIDIA GPU of this machine (is jax[cuda12] '
          'installed?)' if any(devices.glob('nvidia[0-9]*')) else '')


def _without_rows(job: Job) -> str:
  """Clients that were dealt no rows, as happens with a small alpha."""
  empty = _span(data.describe(f)['clients_without_rows']
                for f in job.federations)
  return '' if empty == '0' else ('1 client has no rows' if empty == '1' else
                                  f'{empty} clients have no rows')


def _few_to_validate(job: Job) -> str:
  """Says that too few rows are held out to choose by; else ''."""
  few = min(len(f.validation.labels) for f in job.federations)
  if not 0 < few < _FEW_TO_VALIDATE:
    return ''
  dealt = job.partitions[0].validation.any() and not job.options.partition_file
  tell, them = ('tells', 'it') if few == 1 else ('tell', 'them')
  return f'{descriptions.count(few, "row")} to validate {tell} little' + (
      f'; with validation_fraction=0 a new run trains on {them}' if dealt
      else '')


def _untested(job: Job) -> str:
  """Names the classes of which there is no row to test; '' if there is none."""
  first = job.federations[0]
  counts = np.bincount(first.test.labels, minlength=first.num_classes)
  absent = [job.facts['class_names'][i] if 'class_names' in job.facts else i
            for i in np.flatnonzero(counts == 0)]
  if not absent:
    return ''
  if not counts.any():
    return 'there are no rows to test'
  more = (f' and {descriptions.count(len(absent) - 3, "other")}'
          if len(absent) > 3 else '')
  return f'no row to test is of class {", ".join(map(str, absent[:3]))}{more}'


def _private(job: Job) -> str:
  """Tells the noise of private steps, which a budget decides; else ''."""
  from fedjax_ssl.report import study
  def terms_of(tree_: Any) -> list[private_labels.Terms]:
    found = jax.tree.leaves(tree_, is_leaf=lambda x: isinstance(
        x, private_labels.Terms))
    return [x for x in found if isinstance(x, private_labels.Terms)]
  shape = runner.state_shape(job.method, job.federations[0])
  if not terms_of(shape.server) or study.is_nominal(job.spec.method):
    return ''
  found = _at_start(job, lambda server: terms_of(server)[0])
  noises = sorted(float(terms.noise) for terms in found)
  noise = ' to '.join(dict.fromkeys(
      f'{number:.3g}' for number in (noises[0], noises[-1])))
  steps = _span(int(terms.steps) for terms in found)
  rows = _span(min(job.spec.labeled_batch, int(count))
               for federation in job.federations
               for count in np.unique(federation.tables.num_labeled) if count)
  return (f'private: each of {steps} steps of a client hides a labeled row by '
          f'noise of {noise} clipping norms on a sum over about {rows} rows')


def _at_start(job: Job, read: Callable[[Any], Any]) -> list[Any]:
  """Returns what is read of the server's first record, of each federation.

  Compiled, it leaves out all of the record that is not read.
  """
  return [jax.jit(lambda federation=federation: read(job.method.init(
      jax.random.key(0), federation).server))()
          for federation in job.federations]


def _natural(job: Job) -> str:
  """Says that the clients are those that the data name; else ''."""
  return ('rows are with the clients that the data name'
          if job.options.partition == 'natural' else '')


def _rows_left_out(job: Job) -> str:
  """Says how many rows `max_rows` leaves out; '' if none."""
  if not job.options.max_rows:
    return ''
  dealt = job.partitions[0]
  beyond = job.labels.size - int(np.sum(
      dealt.validation | (dealt.labeled >= 0) | (dealt.unlabeled >= 0)))
  return f'{beyond:,} others left out by max_rows' if beyond else ''


def _schedules(job: Job) -> str:
  """Schedules that end before the run, or after it."""
  span, rounds_ = job.spec.schedule_rounds, job.options.num_rounds
  if span is None or span == rounds_:
    return ''
  if not _has_end(job):
    return f'ramps, if any, span {span:,} of {rounds_:,} rounds'
  if span > rounds_:
    return f'stops at round {rounds_:,} of a schedule of {span:,}'
  last = float(_schedule(job, span)(jnp.int32(rounds_ - 1)))
  return (f'the schedule, {job.spec.lr_schedule}, spans {span:,} of '
          f'{rounds_:,} rounds, of which the last has {last:.3g} of the rate')


def _has_end(job: Job) -> bool:
  """Returns whether the schedule may need to know how long the run is."""
  if registry.is_own(job.spec.lr_schedule, optimizers.SCHEDULES):
    return True
  try:
    _schedule(job, None)
    return False
  except FieldError as error:
    return isinstance(error.__cause__, checks.LengthError)


def _schedule(job: Job, span: int | None) -> optimizers.Schedule:
  return optimizers.make_schedule(job.spec.lr_schedule, span)


def last_learning(job: Job) -> int:
  """Returns the round after which all rounds of the run have a rate of 0.

  That is its last one for a schedule which is not at 0 by then, spans the run,
  or does not depend on the number of rounds.
  """
  span, rounds_ = job.spec.schedule_rounds, job.options.num_rounds
  if span is None or span >= rounds_ or rounds_ > _MOST_ROUNDS or (
      not _has_end(job)):
    return rounds_
  factors = np.abs(jax.vmap(_schedule(job, span))(
      jnp.arange(rounds_, dtype=jnp.int32)))
  return int(np.flatnonzero(factors > _ZERO).max(initial=-1)) + 1


def warnings(job: Job) -> list[str]:
  """Returns lines on the last rounds, for the start and the end of a run."""
  return [line for line in (in_vain(job), used_up(job)) if line]


def used_up(job: Job) -> str:
  """Says in a line when the budget of epsilon ends; '' if the run does first.

  What is private is told by the method's report alone.
  """
  report, rounds_ = job.method.report, job.options.num_rounds
  if report is None or rounds_ > _MOST_ROUNDS or (
      'epsilon' not in jax.eval_shape(
          report, runner.state_shape(job.method, job.federations[0]).server,
          jnp.int32(0))):
    return ''
  rounds_done = jnp.arange(rounds_ + 1, dtype=jnp.int32)
  last, spent = 0, 0.0
  for epsilons in map(np.asarray, _at_start(job, lambda server: jax.vmap(
      lambda round_: report(server, round_)['epsilon'])(rounds_done))):
    first = int(np.argmax(epsilons == epsilons[-1]))
    last, spent = max((last, spent), (first, float(epsilons[-1])))
  if not 0 < last < rounds_:
    return ''
  return (f'Note: {job.name} reads no label after round {last:,}: it has spent '
          f'epsilon {spent:.3g}, and a round more would exceed its budget. To '
          f'spread it over {rounds_:,} rounds begin anew with as many, and '
          'with more noise or without noise_multiplier.')


def in_vain(job: Job) -> str:
  """Says in a line that the last rounds learn nothing; '' if they do."""
  last, rounds_ = last_learning(job), job.options.num_rounds
  if last >= rounds_:
    return ''
  return (f'Note: {job.name} learns nothing after round {last:,}, where its '
          f'schedule, {job.spec.lr_schedule}, ends at a rate of 0. To train '
          f'longer begin anew with {rounds_:,} rounds.')


def _attacked(job: Job) -> str:
  """Names the clients that attack, for each seed."""
  found = job.facts.get('hostile_clients', {})
  said = [', '.join(map(str, clients)) or 'none' for clients in found.values()]
  if len(said) > 1:
    said = [f'{clients} of seed {seed}'
            for clients, seed in zip(said, found, strict=True)]
  return f'{job.spec.attack} by clients {" and ".join(said)}' if said else ''


def _few_updates(job: Job) -> str:
  """Says that cohorts are too small for what the rule promises; else ''."""
  said = (aggregators.too_few(job.spec.aggregator, size)
          for _, size in job.cohorts)
  return '; '.join(dict.fromkeys(filter(None, said)))


def _open_bounds(job: Job) -> str:
  """Says that bounds learn labels that the method keeps private; else ''."""
  from fedjax_ssl.report import study
  noisy = study.noisy_networks(job.spec.method)
  if not job.options.bounds or noisy in (None, 'generator'):
    return ''
  return 'its bounds learn from the same labels without noise (bounds=False)'


def _own_knobs(job: Job) -> str:
  """Says with which knobs the setting has the method, if none are given."""
  found = settings.SETTINGS.get(job.origin.get('setting', ''))
  own = str(found.defaults.get('method', '')) if found else ''
  if '(' not in own or job.options.method.strip() != registry.name_of(own):
    return ''
  return f'this setting has it as {own} by default'


def _switched_off(job: Job) -> str:
  """Knobs whose value switches something off."""
  return '; '.join(task_lib.notes(job.spec))


def _viewless(job: Job) -> str:
  """Says that the method augments nothing, unlike those beside it."""
  if job.views or {job.spec.weak, job.spec.labeled_view or 'none',
                   job.spec.strong} == {'none'}:
    return ''
  return ('it makes no views of its rows, so weak and strong do nothing; '
          'methods.parts.network.views makes them')


# Each takes the job and returns a note for the line, or ''.
NOTES: tuple[Callable[[Job], str], ...] = (
    _unseen, _natural, _rows_left_out, _few_to_validate, _without_rows,
    _untested, _private,
    _schedules, _attacked, _few_updates, _open_bounds, _own_knobs, _viewless,
    _switched_off)
