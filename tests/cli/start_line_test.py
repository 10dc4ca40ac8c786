"""Every run says first what learns from what."""
from __future__ import annotations

import dataclasses
import re
import textwrap
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_ssl
from fedjax_ssl import methods
from fedjax_ssl.core import noting
from fedjax_ssl.methods.parts import private_labels
from fedjax_ssl.running import job, start_line
from fedjax_ssl.training import runner, workdir
from tests import toy
from tests.cli import launcher


def stub(**facts: Any) -> Any:
  """What a line asks of a job, and no more."""
  return types.SimpleNamespace(**facts)


def first(output: str) -> str:
  line, = re.findall(r'^.* (?:starts|continues at round \d+): .*$', output,
                     re.M)
  assert output.index(line) < output.find(': round ')
  return line


def test_a_run_says_what_it_trains(tmp_path):
  args = launcher.SMALL
  line = first(launcher.run(tmp_path / 'run', *args, '--num_rounds=1'))
  facts = workdir.read_config(tmp_path / 'run')['facts']['federation']
  run = fedjax_ssl.load(tmp_path / 'run')
  model = run.task.model.init(jax.random.key(0)).params
  count = sum(np.size(leaf) for leaf in jax.tree.leaves(model))
  assert line == (
      'fixmatch(threshold=0.3, keep_local=True) starts: digits; 6 clients, '
      f'3 a round; {facts["labeled"]["total"]} labeled and '
      f'{facts["unlabeled"]["total"]:,} unlabeled rows; '
      f'{facts["num_test"]} test and {facts["num_validation"]} validation '
      'rows; 10 classes; '
      f'{count} parameters; 1 CPU device; 2 steps a client and round; 2 seeds.')
  # What was done is said, and what is to be minded.
  again = first(launcher.run(tmp_path / 'run', *args, '--num_rounds=2'))
  assert again == line.replace('starts', 'continues at round 1').replace(
      ' seeds.', ' seeds; ramps, if any, span 1 of 2 rounds.')
  assert ' starts: ' not in launcher.run(tmp_path / 'run', *args,
                                         '--num_rounds=2')


def works(name: str, **changes) -> list[noting.Work]:
  with noting.passes() as noted:
    methods.make(name, toy.task(**changes))
  with noting.passes() as none:
    pass
  assert not none.works
  return noted.works


@pytest.mark.parametrize('name, idle', [
    ('fedavg', False), ('moon', False), ('fixmatch', True), ('semifl', True)])
def test_clients_whose_rows_all_have_labels_may_have_nothing_to_do(name, idle):
  """Of the methods that label rows, where the server has the labels."""
  federation, _ = toy.federation('server')
  clients = federation.clients
  swapped = type(clients)(clients.unlabeled, clients.num_unlabeled,
                          clients.labeled, clients.num_labeled)
  for shards, wanted in ((clients, not idle), (swapped, idle)):
    made = stub(
        federations=[dataclasses.replace(federation, clients=shards)],
        works=works(name, labels_at='server'))
    assert start_line.is_idle(made) == wanted


@pytest.mark.parametrize('name', methods.METHODS)
def test_every_method_says_how_many_steps_it_takes(name):
  assert works(name)


def test_steps_are_those_of_the_streams_that_are_used():
  clients = toy.federation()[0].clients
  sizes = np.asarray(clients.num_labeled), np.asarray(clients.num_unlabeled)
  changes = {'labeled_batch': 2, 'unlabeled_batch': 3, 'local_epochs': 2,
             'local_steps': 0}
  known, unknown = (2 * -(-n // b) for n, b in zip(sizes, (2, 3)))
  for name, wanted in (('fedavg', known),
                       ('fixmatch', np.maximum(known, unknown))):
    work, = works(name, **changes)
    assert start_line._of_clients(work, clients) == [n for n in wanted if n]
    assert len({*wanted}) > 1  # Else this shows little.


def test_a_gpu_that_jax_does_not_see_is_told(tmp_path, monkeypatch):
  """Unless the CPU was asked for, in any of JAX's ways."""
  def said():
    return start_line._unseen(stub(), tmp_path)
  for name in ('JAX_PLATFORM_NAME', 'CUDA_VISIBLE_DEVICES'):
    monkeypatch.delenv(name, raising=False)
  before = jax.config.values['jax_platforms']
  try:
    jax.config.update('jax_platforms', None)
    (tmp_path / 'nvidiactl').touch()
    assert not said()
    (tmp_path / 'nvidia0').touch()
    assert 'does not see the NVIDIA GPU' in said()
    for name, value in (('JAX_PLATFORM_NAME', 'cpu'),
                        ('CUDA_VISIBLE_DEVICES', ''),
                        ('CUDA_VISIBLE_DEVICES', '-1')):
      monkeypatch.setenv(name, value)
      assert not said()
      monkeypatch.delenv(name)
    jax.config.update('jax_platforms', 'cpu')
    assert not said()
  finally:
    jax.config.update('jax_platforms', before)


def test_ranges():
  assert start_line._span([1200, 7, 90]) == '7 to 1,200'
  assert start_line._span([5, 5]) == '5' and start_line._span([]) == ''


@pytest.mark.parametrize('count, dealt, file, said', [
    (0, False, None, ''), (20, True, None, ''),
    (1, True, None, '1 row to validate tells little; with '
     'validation_fraction=0 a new run trains on it'),
    (2, True, None, '2 rows to validate tell little; with '
     'validation_fraction=0 a new run trains on them'),
    # An option moves no rows that the data, or a file, hold out.
    (19, False, None, '19 rows to validate tell little'),
    (19, True, 'x.npz', '19 rows to validate tell little')])
def test_few_rows_to_validate_are_said(count, dealt, file, said):
  federation = stub(validation=stub(labels=np.zeros(count)))
  assert start_line._few_to_validate(stub(
      federations=[federation], options=stub(partition_file=file),
      partitions=[stub(validation=np.array([dealt]))])) == said


@pytest.mark.parametrize('labels, names, said', [
    ([0, 1, 2, 3, 4], None, ''), ([0, 1, 2, 4], None, '3'),
    ([0, 1, 2, 4], list('abcde'), 'd'), ([4], None, '0, 1, 2 and 1 other'),
    ([], None, '')])
def test_classes_without_rows_to_test_are_said(labels, names, said):
  federation = stub(test=stub(labels=np.array(labels, int)), num_classes=5)
  facts = {} if names is None else {'class_names': names}
  assert start_line._untested(stub(federations=[federation], facts=facts)) == (
      'there are no rows to test' if not labels else
      said and f'no row to test is of class {said}')


@pytest.mark.parametrize('method, rows', [
    ('dpsgd(private_steps=3, noise_multiplier=9)', True), ('fedavg', False)])
def test_the_noise_of_private_steps_is_said(method, rows):
  pytest.importorskip('dp_accounting')
  federation, _ = toy.federation()
  made = methods.make(method, toy.task(schedule_rounds=4))
  said = start_line._private(stub(
      method=made, federations=[federation, federation],
      spec=stub(method=method, labeled_batch=2)))
  assert said == ('private: each of 3 steps of a client hides a labeled row by '
                  'noise of 9 clipping norms on a sum over about 2 rows'
                  if rows else '')


def test_the_noise_of_several_seeds_is_a_span():
  """Largest and smallest, in whatever order the seeds have them."""
  federation, _ = toy.federation()
  made = methods.make('dpsgd(private_steps=3, noise_multiplier=9)', toy.task(
      schedule_rounds=4))
  state = runner.state_shape(made, federation)
  noises = iter((0, .8, .7, .9))  # The first is for the shapes alone.
  def init(key, federation):
    del key, federation
    terms = private_labels.Terms(jnp.int32(4), jnp.int32(3),
                                 jnp.float32(next(noises)))
    return state._replace(server=terms)
  said = start_line._private(stub(
      method=made._replace(init=init), federations=[federation] * 3,
      spec=stub(method='dpsgd', labeled_batch=2)))
  assert 'noise of 0.7 to 0.9 clipping norms' in said


def test_what_a_knob_switches_off_is_said():
  for method, said in (
      ('fixmatch(threshold=0)', 'every unlabeled row counts'),
      ('fixmatch(mu=0.1)', "does nothing with server='fedavg'"),
      ('fixmatch', '')):
    spec = fedjax_ssl.TaskSpec(10, (8, 8, 1), method=method)
    notes = [note(stub(spec=spec))
             for note in start_line.NOTES[-1:]]
    assert notes == [f'{method}: {said}' if said else '']


@pytest.mark.parametrize('rule, size, said', [
    ('krum', 4, 'krum promises nothing for 4 updates: with 1 hostile there '
     'must be 5'),
    ('krum', 5, ''), ('krum', 6, 'with 2 hostile there must be 7'),
    ('krum(share=0)', 2, 'with 0 hostile there must be 3'),
    ('krum(share=0.49)', 100, 'with 49 hostile there must be 101'),
    ('multi_krum', 1, 'multi_krum promises nothing for 1 update:'),
    ('multi_krum(share=0)', 1, ''), ('median', 1, ''), ('mean', 1, '')])
def test_a_rule_says_that_a_cohort_is_too_small_for_it(rule, size, said):
  got = start_line._few_updates(stub(
      spec=fedjax_ssl.TaskSpec(10, (8, 8, 1), aggregator=rule),
      cohorts=[(1, size), (1, size)]))
  assert said in got and bool(said) == bool(got)
  assert got.count('promises') <= 1


SPANS = 'the schedule, {}, spans 4 of 6 rounds, of which the last has {} of'


@pytest.mark.parametrize('schedule, span, said, last', [
    ('cosine', 4, SPANS.format('cosine', 0), 4),
    ('linear', 4, SPANS.format('linear', 0), 4),
    ('cosine(final=0.1)', 4, SPANS.format('cosine(final=0.1)', 0.1), 6),
    ('fixmatch_cosine', 4, SPANS.format('fixmatch_cosine', 0.195), 6),
    ('warmup_cosine', 4, SPANS.format('warmup_cosine', 1), 6),
    ('warmup_cosine(rounds=3)', 4,
     SPANS.format('warmup_cosine(rounds=3)', 0), 4),
    ('constant', 4, 'ramps, if any, span 4 of 6 rounds', 6),
    ('exponential(decay=0.001)', 4, 'ramps, if any, span 4 of 6 rounds', 6),
    ('OWN:shorter', 4, SPANS.format('OWN:shorter', 0.25), 6),
    ('OWN:rising', 4, SPANS.format('OWN:rising', 0.25), 6),
    ('cosine', 8, 'stops at round 6 of a schedule of 8', 6)])
def test_a_schedule_of_another_length_is_said(schedule, span, said, last,
                                              tmp_path):
  file = tmp_path / 'own.py'
  file.write_text(textwrap.dedent("""
      import jax.numpy as jnp
      def shorter(horizon):
        step = 1 / horizon  # Not without a number of rounds.
        return lambda r: jnp.float32(step)
      def rising(horizon):
        return lambda r: jnp.abs(1 - r / horizon)
      """))
  schedule, said = (x.replace('OWN', str(file)) for x in (schedule, said))
  spec = fedjax_ssl.TaskSpec(10, (8, 8, 1), lr_schedule=schedule,
                             schedule_rounds=span)
  job = stub(name='mine', spec=spec, options=stub(num_rounds=6))
  assert said in start_line._schedules(job)
  assert start_line.last_learning(job) == last
  assert start_line.in_vain(job).startswith(
      '' if last == 6 else f'Note: mine learns nothing after round {last}')
  assert bool(start_line.in_vain(job)) == (last < 6)


@pytest.mark.parametrize('method, rounds, last', [
    # Four rounds are planned; the noise is solved for all of them.
    ('dpsgd(private_steps=1)', 4, 4), ('dpsgd(private_steps=1)', 6, 4),
    ('dpsgd(private_steps=1, noise_multiplier=.9)', 4, None),
    ('dpsgd(private_steps=1, noise_multiplier=90)', 4, 4), ('fedavg', 6, 6)])
def test_a_budget_that_ends_before_the_run_is_said(method, rounds, last):
  """After the last private round the network of labels alone stays."""
  pytest.importorskip('dp_accounting')
  federation, _ = toy.federation()
  made = methods.make(method, toy.task(schedule_rounds=4, local_steps=1))
  said = start_line.used_up(stub(
      name='mine', method=made, federations=[federation],
      options=stub(num_rounds=rounds)))
  if last is None:
    budget = made.init(jax.random.key(0), federation).server.budget
    last = int(budget.terms.allowed)
    assert 0 < last < rounds
    assert f'epsilon {float(budget.epsilons[last]):.3g}, ' in said
  assert said.startswith(
      f'Note: mine reads no label after round {last}:' if last < rounds else '')
  assert bool(said) == (last < rounds)


def test_who_attacks_is_said():
  spec = fedjax_ssl.TaskSpec(10, (8, 8, 1), attack='noise(share=.1)')
  for found, said in (
      ({}, ''), ({'0': [3, 7]}, 'noise(share=.1) by clients 3, 7'),
      ({'0': [3], '4': []},
       'noise(share=.1) by clients 3 of seed 0 and none of seed 4')):
    facts = {'hostile_clients': found} if found else {}
    assert start_line._attacked(stub(
        spec=spec, facts=facts)) == said


@pytest.mark.parametrize('text, cohort, said', [
    ('fedavg', (1, 3), '3'),
    ('rscfed(groups=2)', (2, 3), '2 groups of 3')])
def test_it_says_who_takes_part(text, cohort, said):
  federation, _ = toy.federation()
  with noting.passes() as noted:
    made = methods.make(text, toy.task(cohort_size=3))
  state = runner.state_shape(made, federation)
  cohorts = [job._cohort(one, federation, state) for one in noted.samplers]
  assert cohorts == [cohort]
  assert start_line._cohorts(stub(cohorts=cohorts)) == said


@pytest.mark.parametrize('method, bounds, said', [
    ('dpsgd', True, True), ('dpsgd', False, False), ('fixmatch', True, False),
    ("fedssl(dp_scope='classifier')", True, True),
    ("fedssl(dp_scope='generator')", True, False)])
def test_bounds_beside_private_labels_are_said(method, bounds, said):
  one = stub(
      spec=stub(method=method),
      options=stub(bounds=bounds))
  assert ('bounds=False' in start_line._open_bounds(one)) == said


@pytest.mark.parametrize('method, told', [
    ('fixmatch', True), ('fixmatch(threshold=0.9)', False), ('uda', False)])
def test_the_knobs_of_the_setting_are_told_where_none_are_given(method, told):
  one = stub(origin={'setting': 'digits_dirdir'},
             options=stub(method=method))
  line = 'this setting has it as fixmatch(threshold=0.8) by default'
  assert start_line._own_knobs(one) == (line if told else '')


RAW = """
import jax.numpy as jnp
from fedjax_ssl import losses
from fedjax_ssl.core.local_training import Aux
from fedjax_ssl.methods.parts import averaging, network

def raw(task, *, viewed: bool = False):
  def loss_fn(model, given, batch, key):
    rows = network.labeled_view(task, batch.labeled, key) if viewed else (
        batch.labeled)
    (logits,), stats = network.forward(task, model, rows, key=key)
    loss, _ = losses.cross_entropy(logits, rows.labels, rows.mask)
    return loss, Aux(stats, {})
  return averaging.averaging(task, loss_fn, streams='labeled')
"""


@pytest.mark.parametrize('text, flags, told', [
    ('raw', (), True), ('raw(viewed=True)', (), False),
    ('raw', ('--weak=none', '--strong=none'), False)])
def test_a_method_without_views_is_told(tmp_path, text, flags, told):
  """Beside others that augment their rows it would seem to win or lose."""
  (tmp_path / 'mine.py').write_text(RAW)
  said = launcher.run(
      tmp_path / 'run', *launcher.SMALL, '--num_rounds=1', '--seeds=0', *flags,
      f'--method={tmp_path}/mine.py:{text}')
  assert ('it makes no views of its rows' in first(said)) == told
