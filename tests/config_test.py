"""Every option has one default and one range, for flags, JSON and Python."""
from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import re

from absl import flags
import jax
import numpy as np
import pytest

import fedjax_ssl
from fedjax_ssl import config
from fedjax_ssl.cli import train
from fedjax_ssl.core import checks, flag_kinds, knobs, optimizers
from tests import toy

SHARED = [field.name for field in dataclasses.fields(fedjax_ssl.TaskSpec)
          if field.name in config.OPTIONS]
NUMBERS = [name for name, option in config.OPTIONS.items()
           if option.kind in (int, float)]


def _spec(**changes):
  return fedjax_ssl.TaskSpec(**{
      'num_classes': toy.NUM_CLASSES, 'input_shape': (toy.SIDE, toy.SIDE, 1),
      'model': 'linear', 'weak': 'none', 'strong': 'none', 'cohort_size': 4,
      **changes})


def test_defaults_are_the_same_everywhere():
  spec, told = fedjax_ssl.TaskSpec(2, (8, 8, 1)), config.Config()
  assert len(SHARED) > 20
  for name in SHARED:
    assert getattr(spec, name) == getattr(told, name)
  for name in config.OPTIONS:
    assert train.FLAGS.find_module_defining_flag(checks.flag(name))
  assert vars(told) == {name: option.default
                        for name, option in config.OPTIONS.items()}


@pytest.mark.parametrize('name', NUMBERS)
def test_a_range_is_the_same_everywhere(name):
  """What a flag refuses, Python and a stored configuration refuse as well."""
  bound = config.OPTIONS[name].bound
  step = 1 if bound.whole else 1e-3
  for value in (bound.least - step, bound.most * (1 + step) + step, math.nan,
                'x'):
    value = value if isinstance(value, str) or not bound.whole or (
        math.isnan(value)) else int(value)
    with pytest.raises(config.FieldError) as refused:
      config.resolve({name: value})
    assert (refused.value.field, str(refused.value)[:2 + len(name)]) == (
        name, f'{name}=' + f'{value}'[:1])
    with checks.marking('--'):
      assert str(refused.value).startswith(f'--{checks.flag(name)}={value}')
    if name in SHARED:
      with pytest.raises(config.FieldError) as again:
        fedjax_ssl.make_task(_spec(**{name: value}))
      assert str(again.value) == str(refused.value)
    holder = flags.FlagValues()
    flag = train.FLAGS[name]
    with pytest.raises((flags.IllegalFlagValueError, config.FieldError)):
      flags.DEFINE(flag.parser, name, None, '', holder)
      holder(['', f'--{name}={value}'])
      config.resolve({name: holder[name].value})
  if not bound.below:
    config.check(name, bound.most)
  if not bound.above:
    config.check(name, bound.least)


def test_a_field_is_named_as_a_flag_or_as_in_python():
  with pytest.raises(config.FieldError) as refused:
    config.resolve({'cohort_size': 9, 'num_clients': 8}, ['cohort_size'])
  assert str(refused.value) == (
      'cohort_size=9 and num_clients=8: a round has at most all clients.')
  with checks.marking('--'):
    assert str(refused.value).startswith(
        '--cohort_size=9 and --num_clients=8: ')
  with pytest.raises(config.FieldError) as refused:
    fedjax_ssl.make_method('feddure', toy.task(labels_at='server'))
  with checks.marking('--'):
    assert str(refused.value).startswith(
        '--method=feddure: --labels_at=server: give clients')
  assert str(refused.value).startswith('method=feddure: labels_at=server: ')


@pytest.mark.parametrize('values, given, words', [
    ({'seed': 1, 'seeds': ['1', '2']}, ('seed', 'seeds'), 'seed=1 .*seeds=1,2'),
    ({'eval_only': True}, (), 'eval_only.*workdir'),
    ({'process_id': 1}, (), 'process_id=1.*distributed'),
    ({'method': 'fedavg', 'profile': 'paper'}, (), 'profile=paper .*fedavg'),
    ({'weak': 'a\nb'}, (), 'one line')])
def test_what_does_not_go_together_is_refused(values, given, words):
  with pytest.raises(config.FieldError, match=words):
    config.resolve(values, given)


@pytest.mark.parametrize('optimizer', knobs.OPTIMIZERS)
def test_momentum_of_a_setting_goes_to_optimizers_that_have_none(optimizer):
  values = {'optimizer': optimizer, 'momentum': .9}
  reads = optimizer not in knobs.OWN_MOMENTUM
  assert config.resolve(values, ['optimizer']).momentum == (.9 if reads else 0)
  assert config.resolve(values, [*values]).momentum == .9
  with contextlib.nullcontext() if reads else pytest.raises(
      checks.FieldError, match='momentum'):
    optimizers.make(optimizer, learning_rate=.1, momentum=.9)


def test_an_unknown_option_is_refused():
  with pytest.raises(TypeError, match='alhpa'):
    config.resolve({'alhpa': 1.0})


def test_kinds_of_flags_name_flags():
  kinds = {name: value for name, value in vars(flag_kinds).items()
           if name.isupper()}
  assert len(kinds) == 6
  for name, value in kinds.items():
    assert not {*value} - config.OPTIONS.keys(), name
    assert len({*value}) == len(value), name
  for_a_start = {n for n, one in config.OPTIONS.items() if one.this_start}
  assert for_a_start <= {*flag_kinds.OF_A_SEED}, for_a_start


def test_flags_are_read_in_one_place():
  """All that a run does can be called without; a sweep reads its cells'."""
  folder = pathlib.Path(fedjax_ssl.__file__).parent
  readers = {path.relative_to(folder).as_posix()
             for path in folder.rglob('*.py')
             if re.search(r'\bFLAGS\b', path.read_text('utf-8'))}
  assert readers == {'cli/train.py'}


@pytest.mark.parametrize('text, changes', [
    ("pseudo_label(form='hard', threshold=0.0)", {}),
    ('fedavg', {'lr_schedule': 'cosine'})])
def test_schedules_follow_train(text, changes):
  """Without a number of their own they span the rounds that are asked for."""
  federation, _ = toy.federation()
  def after(rounds, **more):
    task = fedjax_ssl.make_task(_spec(**changes, **more))
    method = fedjax_ssl.make_method(text, task)
    result = fedjax_ssl.train(method, [federation], num_rounds=rounds)
    assert method.predict is not None
    assert np.isfinite(method.predict(
        result.states[0].server, federation.test.inputs)).all()
    return [np.asarray(leaf) for leaf in jax.tree.leaves(result.states[0])
            if not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
  found = after(2)
  equal = [all(map(np.array_equal, found, after(2, schedule_rounds=rounds)))
           for rounds in (2, 9)]
  assert equal == [True, False]


def test_a_length_that_is_given_stays():
  task = toy.task()
  assert task.spanning(3) is task
  bare = dataclasses.replace(task, schedule_rounds=None)
  assert bare.spanning(3).schedule_rounds == 3
