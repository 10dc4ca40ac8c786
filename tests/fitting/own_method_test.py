"""Methods and rules of one's own: messages name what is wrong, nothing else."""
from __future__ import annotations

import functools
import gc
import importlib
import re
import tempfile
from typing import Any
import warnings

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_ssl
from fedjax_ssl import aggregation, losses
from fedjax_ssl.cli import errors
from fedjax_ssl.core.local_training import Aux
from fedjax_ssl.methods.parts import averaging, network


def made(task, loss_fn=None, streams='labeled', **options):
  def loss(model, given, batch, key):
    rows = batch.labeled
    (logits,), stats = network.forward(task, model, rows, key=key)
    return losses.cross_entropy(logits, rows.labels, rows.mask)[0], Aux(
        stats, {})
  return averaging.averaging(task, loss_fn or loss, streams=streams, **options)


def few_arguments(task):
  return made(task, lambda model, batch, key: 0.0)


def no_aux(task):
  return made(task, lambda model, given, batch, key: jnp.float32(0))


def no_number(task):
  return made(task, lambda *a: (jnp.ones(3), Aux({}, {})))


def accuracy_of_its_own(task):
  def loss(model, *unused):
    value = sum(x.sum() for x in jax.tree.leaves(model.params))
    return value, Aux({}, {'accuracy': value})
  return made(task, loss)


def other_memory(task):
  def loss(model, given, batch, key):
    del given, batch, key
    value = sum(x.sum() for x in jax.tree.leaves(model.params))
    return value, Aux({}, {}, jnp.zeros(3))
  return made(task, loss, remember=lambda f: jnp.zeros((f.num_clients, 2)))


def memory_of_nobody(task):
  return made(task, remember=lambda f: jnp.zeros(7))


def strange_option(task):
  return made(task, weightng='uniform')


def fails(task):
  def loss(*args):
    raise KeyError('absent')
  return made(task, loss)


def strange_streams(task):
  return made(task, streams='bth')


def report_of_accuracy(task):
  return made(task)._replace(
      report=lambda server, round_: {'val_loss': jnp.float32(0)})


def report_of_one(task):
  return made(task)._replace(report=lambda server: {})


def report_of_vectors(task):
  return made(task)._replace(report=lambda server, round_: {'v': jnp.ones(3)})


def report_of_a_number(task):
  return made(task)._replace(report=lambda server, round_: jnp.float32(1))


def fit(method, **options):
  return fedjax_ssl.fit(method, 'digits', **{
      'clients': 3, 'labels_per_class': 2, 'rounds': 2, 'model': 'linear',
      'local_steps': 1, 'progress': False, **options})


@pytest.mark.parametrize('method, words', [
    (few_arguments, 'takes 3 positional arguments but 4 were given'),
    (no_aux, r'its loss returns an array; allowed is \(loss, Aux\('),
    (no_number, r'its loss has the shape \[3\]'),
    (accuracy_of_its_own, "its metric 'accuracy' has the name of one that an "),
    (other_memory, r'its loss gives float32\[3\], not float32\[2\] as Aux.mem'),
    (memory_of_nobody, r'keep, memory.kept, is float32\[7\]; its first axis '
     'must be the clients, 3'),
    (strange_option, "unexpected keyword argument 'weightng'"),
    (fails, "KeyError: 'absent'"),
    (strange_streams, 'bth.* Allowed: both, labeled, unlabeled'),
    (report_of_accuracy, "its metric 'val_loss' has the name of one that an "),
    (report_of_one, r'report must take \(server, round\)'),
    (report_of_vectors, r"not 'v' of shape \(3,\)"),
    (report_of_a_number, 'must return numbers by name')],
    ids=lambda x: getattr(x, '__name__', ''))
def test_the_method_is_named(method, words):
  with pytest.raises(ValueError, match=words) as error:
    fit(method)
  assert str(error.value).startswith(f'method={method.__name__}: ')
  assert '\n' not in str(error.value)


def halved(stacked, weights, *, factor: float = 0.5):
  return jax.tree.map(lambda x: factor * x,
                      aggregation.weighted_mean(stacked, weights))


def unreduced(stacked, weights):
  del weights
  return stacked


def fails_with(stacked, weights):
  raise KeyError('absent')


def test_a_rule_may_be_a_function():
  """With knobs, as a method may; its text is what the run stores."""
  whole, half, same = (
      fit('fedavg', aggregator=rule) for rule in (
          functools.partial(halved, factor=1.0), halved, 'halved(factor=0.5)'))
  assert whole.options.aggregator == 'halved(factor=1.0)'
  assert half.options.aggregator == 'halved'
  plain = fit('fedavg')
  np.testing.assert_allclose(whole.metrics['loss'], plain.metrics['loss'],
                             rtol=1e-5)
  assert not np.allclose(half.metrics['loss'], plain.metrics['loss'], rtol=1e-4)
  np.testing.assert_array_equal(half.metrics['loss'], same.metrics['loss'])


class Halves(nn.Module):
  """A network of a notebook."""

  num_classes: int
  width: int = 4

  @nn.compact
  def __call__(self, x):
    x = nn.relu(nn.Dense(self.width)(x.reshape((x.shape[0], -1))))
    return nn.Dense(self.num_classes)(x)


def darker(*, by: int = 2):
  return lambda key, images: images // by


def slower(horizon, *, by: float = 2.0):
  return lambda round_: 1 / by


def test_a_network_views_and_a_schedule_may_be_the_users():
  """A class, and functions; their texts are what the run stores."""
  run = fit('fixmatch', model=functools.partial(Halves, width=8), weak=darker,
            strong=darker, lr_schedule=slower)
  told = run.options
  assert (told.model, told.weak, told.strong, told.lr_schedule) == (
      'Halves(width=8)', 'darker', 'darker', 'slower')
  plain = fit('fixmatch', model='Halves(width=8)', weak='none', strong='none',
              lr_schedule='slower')
  assert not np.allclose(run.metrics['loss'], plain.metrics['loss'], rtol=1e-4)


@pytest.mark.parametrize('options, words', [
    ({'model': Halves(3)}, "model must be a text, such as 'cnn', or a class of "
     'Flax linen modules .*, not an instance of Halves'),
    ({'weak': lambda: None}, "weak must be a text, such as 'flip_crop', .*not "
     'a lambda')])
def test_what_is_no_class_and_no_named_function(options, words):
  with pytest.raises(TypeError, match=words):
    fit('fixmatch', **options)


def test_a_rule_of_the_library_stands_for_its_name():
  options = fit('fedavg', aggregator=functools.partial(
      aggregation.trimmed_mean, trim=0.3)).options
  assert options.aggregator == 'trimmed_mean(trim=0.3)'


@pytest.mark.parametrize('rule, words', [
    (unreduced, '^aggregator=unreduced: gives params'),
    (fails_with, "^aggregator=fails_with: KeyError: 'absent' "
     r'\(at .*own_method_test.py:\d+\)$')],
    ids=lambda x: getattr(x, '__name__', ''))
def test_the_rule_is_named(rule, words):
  with pytest.raises(ValueError) as error:
    fit('fedavg', aggregator=rule)
  assert re.search(words, str(error.value))
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('body, words', [
    ('def rule(stacked, weights):\n  return stacked',
     r'gives params.*; a rule takes .* gives one update \(at {file}:1\)[.]'),
    ('def rule(weights, stacked):\n  return stacked.params',
     r'AttributeError: .* params \(at {file}:2; --verbosity=1 shows all\)'),
    ('def rule(*, by=1):\n  by', 'gives no rule but NoneType; does it end .*'),
    ('def rule(*, by=1):\n  return by.real.imaginary',
     r"AttributeError: .*'imaginary' \(at {file}:2; --verbosity=1 .*")])
def test_the_rule_of_a_file_is_named_as_programs_say_it(tmp_path, body, words):
  file = tmp_path / 'bad.py'
  file.write_text(body + '\n')
  with pytest.raises(ValueError) as error:
    fit('fedavg', aggregator=f'{file}:rule')
  assert re.fullmatch(f'--aggregator={file}:rule: {words.format(file=file)}',
                      errors.line(error.value, {}))


def test_a_report_of_any_name_is_of_evaluated_rounds():
  def reported(task):
    def report(server, round_):
      leaves = jax.tree.leaves(server.model.params)
      return {'size': sum(jnp.abs(x).sum() for x in leaves)}
    return made(task)._replace(report=report)
  run = fit(reported, eval_every=2)
  assert run.metrics['round'].tolist() == [2]
  assert run.metrics['size'][0] > 0 and run.metrics['accuracy'][0] > 0


def test_a_file_may_be_imported_and_named(tmp_path, monkeypatch):
  """Both register its method, which is the same."""
  file = tmp_path / 'one_of_mine.py'
  file.write_text('from fedjax_ssl import methods\n\n\n'
                  "@methods.register('one_of_mine')\n"
                  'def one_of_mine(task, *, mu: float = 0.1):\n'
                  "  return methods.METHODS['fedprox'](task, mu=mu)\n")
  monkeypatch.syspath_prepend(tmp_path)
  one_of_mine = importlib.import_module('one_of_mine')
  assert fit(one_of_mine.one_of_mine).name == 'one_of_mine'
  assert 'one_of_mine' in fit(f'{file}:one_of_mine(mu=0.3)').name


def broken(stacked, weights):
  return jax.tree.map(lambda x: x.mean(0) * jnp.nan, stacked)


def test_a_run_that_diverged_warns_its_caller():
  """However much it shows of its progress, and where the caller stands."""
  short: dict[str, Any] = {
      'model': 'linear', 'clients': 3, 'rounds': 1, 'progress': False}
  with pytest.warns(UserWarning, match='fedavg: † diverged: loss') as told:
    fedjax_ssl.fit('fedavg', 'digits', learning_rate=1e30, **short)
  assert [one.filename for one in told] == [__file__]
  with pytest.warns(UserWarning, match='† diverged: every update was broken'):
    fedjax_ssl.fit('fedavg', 'digits', aggregator=broken, **short)


def half_broken(task):
  """A loss that is NaN where the first label of a batch is below 5."""
  def loss(model, given, batch, key):
    rows = batch.labeled
    (logits,), stats = network.forward(task, model, rows, key=key)
    sound = losses.cross_entropy(logits, rows.labels, rows.mask)[0]
    return sound * jnp.where(rows.labels[0] < 5, jnp.nan, 1), Aux(stats, {})
  return made(task, loss)


def test_updates_left_out_are_told_once(capsys):
  """By a line where progress is shown, else by a warning, of each call."""
  short: dict[str, Any] = {'model': 'linear', 'clients': 8, 'rounds': 1,
                           'local_steps': 1, 'cohort_size': 8,
                           'schedule_rounds': 4}
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    fedjax_ssl.fit(half_broken, 'digits', **short)
  assert 'left out from round 1 to 1: NaN' in capsys.readouterr().err
  with pytest.warns(UserWarning, match='[0-9] .* from round 1 on: NaN'):
    run = fedjax_ssl.fit(half_broken, 'digits', progress=False, **short)
  with pytest.warns(UserWarning, match='[1-8] .* from round 2 on: NaN') as told:
    run.resume(2)
  assert len(told) == 1 and not capsys.readouterr().err


def test_a_run_that_leaves_nothing_behind_warns_of_nothing(
    monkeypatch, tmp_path):
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter('always')
    run = fedjax_ssl.fit('fedavg', 'digits', model='linear', clients=3,
                         rounds=1, progress=False)
    assert [*tmp_path.iterdir()]
    del run
    gc.collect()
  assert not [one for one in told if one.category is ResourceWarning]
  assert not [*tmp_path.iterdir()]
