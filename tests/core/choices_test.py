"""What a text stands for, and how to say it under other defaults."""
from __future__ import annotations

import inspect

import pytest

from fedjax_ssl import methods, task
from fedjax_ssl.core import choices, knobs
from fedjax_ssl.data import augment
from tests import toy


def test_all_knobs_are_there_with_the_profiles_values():
  found = choices.resolved("uda(profile='fedmatch', threshold=0)",
                           methods.METHODS)
  assert {k: found[k] for k in ('tsa', 'threshold', 'temperature')} == {
      'tsa': 'exp', 'threshold': 0.0, 'temperature': 1.0}
  assert {*found} == {*inspect.signature(methods.METHODS['uda']).parameters
                      } - {'task'}


@pytest.mark.parametrize('name', [
    n for n, f in methods.METHODS.items()
    if 'profile' in inspect.signature(f).parameters])
def test_every_profile_is_known_with_what_it_stands_for(name):
  """A builder that refuses a profile has told `checked` of the others."""
  with pytest.raises(ValueError, match='profile') as refusal:
    methods.make(f"{name}(profile='?')", toy.task())
  for profile in knobs.profiles_of(methods.METHODS[name]):
    assert profile in str(refusal.value).partition('Allowed: ')[2]
    fixed = choices.resolved(f"{name}(profile='{profile}')", methods.METHODS)
    assert fixed['profile'] == profile
  assert len({repr(choices.resolved(f"{name}(profile='{p}')", methods.METHODS))
              for p in knobs.profiles_of(methods.METHODS[name])}) > 1


@pytest.mark.parametrize('text, was, today', [
    ('uda', {}, 'uda'),
    ('uda', {'tsa': 'none'}, 'uda'),
    ('uda', {'tsa': 'exp', 'temperature': 1.0},
     "uda(tsa='exp', temperature=1.0)"),
    ('uda(threshold=0.5)', {'tsa': 'exp', 'threshold': 0.5},
     "uda(threshold=0.5, tsa='exp')"),
    ('rscfed(groups=2)', {'max_norm': float('inf')},
     'rscfed(groups=2, clip_norm=1e999)')])
def test_a_text_is_restated(text, was, today):
  assert task.restated('method', text, was) == today
  assert not choices.changed(was, choices.resolved(today, methods.METHODS))


@pytest.mark.parametrize('text, was', [
    ('uda', {'lost': 1}), ('fedlabel', {'profile.pull': 0.0})])
def test_what_no_knob_says_is_refused(text, was):
  with pytest.raises(ValueError, match='no knob says'):
    task.restated('method', text, was)


def test_a_view_within_a_view_is_resolved_too():
  was = {'weak': 'flip_crop', 'weak.pad': 3}
  assert task.restated('strong', 'ra_mc', was) == (
      "ra_mc(weak='flip_crop(pad=3)')")


def test_what_data_decide_is_known_where_a_text_says_it():
  assert 'flip' not in choices.resolved('flip_crop', augment.WEAK)
  assert choices.resolved('flip_crop(flip=False)', augment.WEAK)['flip'] is (
      False)
