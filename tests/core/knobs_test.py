"""Bounds of knobs: none without one, what is refused, what is said."""
from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

from fedjax_ssl import methods, models
from fedjax_ssl.core import checks, knobs, optimizers
from fedjax_ssl.data import augment
from fedjax_ssl.methods import fedssl, fixmatch, pseudo_label
from fedjax_ssl.methods.parts import (
  aggregators,
  attacks,
  averaging,
  server_optimizers,
)
from tests import toy

REGISTRIES: dict[str, Any] = {
    'method': methods.METHODS, 'model': models.MODELS, 'weak': augment.WEAK,
    'strong': augment.STRONG, 'schedule': optimizers.SCHEDULES,
    'aggregator': aggregators.AGGREGATORS, 'attack': attacks.ATTACKS,
    'server_optimizer': server_optimizers.SERVER_OPTIMIZERS}
# Checked by their own builders: several numbers, or levels of gray.
_OWN = ('fill', 'tops', 'num_classes')


def _numbers(function):
  """Keyword-only parameters that hold a number."""
  return [p for p in inspect.signature(function).parameters.values()
          if p.kind is p.KEYWORD_ONLY and p.name not in _OWN
          and any(word in str(p.annotation) for word in ('int', 'float'))]


@pytest.mark.parametrize('kind', REGISTRIES)
def test_every_number_has_a_bound_that_its_default_keeps(kind):
  for name, function in REGISTRIES[kind].items():
    for parameter in _numbers(function):
      bound = knobs.bounds_of(function).get(parameter.name)
      assert isinstance(bound, knobs.Bound), f'{name}({parameter.name})'
      if parameter.default is not None:
        knobs.require(parameter.name, parameter.default, bound)


@pytest.mark.parametrize('text', [
    'fixmatch(threshold=2)', 'fixmatch(threshold=95.0)',
    'fed_consist(threshold=5)', 'fedmatch(threshold=2)',
    'feddure(threshold=2)', 'uda(threshold=1.1)', 'flexmatch(threshold=9)',
    'fedirm(confidence=3)', 'rscfed(groups=999999)', 'rscfed(warmup=3)',
    'mixmatch(num_views=100000)', 'pseudo_label(num_views=100000)',
    'fedssl(num_views=100000)', 'fedirm(passes=1000000)',
    'mixmatch(ramp=5)', 'pseudo_label(form="hard", ramp=1.5)',
    'fedssl(ramp=2)', 'fedirm(label_smoothing=1)', 'fedtrinet(scale=100)',
    'fedmatch(num_helpers=100000)', 'fedlabel(labeled_steps=2000000000)',
    'feddure(profile="official", wait_steps=6)',
    'fedssl(gan_width=1000000)', 'fedssl(noise_size=1000000000)'])
def test_what_would_switch_off_or_never_end_is_refused(text):
  knob = text.rpartition(', ')[2].rpartition('(')[2].partition('=')[0]
  with pytest.raises(ValueError, match=knob) as error:
    methods.make(text, toy.task())
  assert '\n' not in str(error.value)


def test_a_profile_is_refused_before_there_are_data():
  knobs.check('method', "rscfed(profile='paper')", methods.METHODS)
  with pytest.raises(checks.FieldError, match="'pap' is unknown. Did you mean"):
    knobs.check('method', "rscfed(profile='pap')", methods.METHODS)


@pytest.mark.parametrize('text, nearest', [
    ("fixmatch(labeler='lokal')", 'local'),
    ("fedavg(weighting='exampels')", 'examples'),
    ("sage(server='local')", ''), ("fl2(weighting='stats')", 'status'),
    ("rscfed(distance='global_nrm')", 'global_norm'),
    ("dpsgd(accountant='rpd')", 'rdp')])
def test_so_is_an_unknown_word(text, nearest):
  meant = f' Did you mean {nearest!r}' if nearest else ' Allowed: '
  with pytest.raises(checks.FieldError, match=f'is unknown.{meant}'):
    knobs.check('method', text, methods.METHODS)
  with pytest.raises(ValueError, match=f'is unknown.{meant}'):
    methods.make(text, toy.task())


def test_usual_words_are_of_knobs_that_take_words_alone():
  @knobs.checked()
  def build(*, weighting: str = 'examples', server: str | int = 3,
            over: str = 'all'):
    return weighting, server, over
  assert build(server='mine', over='none') == ('examples', 'mine', 'none')
  with pytest.raises(ValueError, match="'mine' is unknown"):
    build(weighting='mine')


@pytest.mark.parametrize('make, text', [
    (augment.make_strong, 'ra_mc(num_ops=100000)'),
    (augment.make_strong, 'ra_heart(tops=(1.5, 2))'),
    (augment.make_strong, 'ra_heart(tops=("a",))'),
    (augment.make_weak, 'cutout(fill=(1.5,))'),
    (augment.make_weak, 'cutout(fill=256)'),
    (augment.make_weak, 'token_dropout(rate=1)'),
    (augment.make_weak, 'flip_shift(shift=-1)'),
    (lambda text: models.make(text, num_classes=3, input_shape=(8, 8, 1)),
     'mlp(depth=100000)'),
    (lambda text: models.make(text, num_classes=3, input_shape=(8, 8, 1)),
     'cnn(width=100000000)'),
    (lambda text: optimizers.make('sgd', learning_rate=.1, schedule=text),
     'warmup_cosine(rounds=0)'),
    (lambda text: optimizers.make('sgd', learning_rate=.1, schedule=text),
     'linear(final=-5)'),
    (lambda text: optimizers.make('sgd', learning_rate=.1, schedule=text),
     'exponential(decay=5)')])
def test_so_it_is_of_views_networks_and_schedules(make, text):
  knob = text.partition('(')[2].partition('=')[0]
  with pytest.raises(checks.FieldError, match=f'{knob} must be'):
    make(text)


def test_bounds_hold_from_python_too():
  with pytest.raises(ValueError, match=r'threshold must be in \[0, 1.1\].*95'):
    fixmatch.fixmatch(toy.task(), threshold=95)
  wrong: dict = {'threshold': '0.9'}
  with pytest.raises(ValueError, match='threshold must be a number'):
    fixmatch.fixmatch(toy.task(), **wrong)
  with pytest.raises(ValueError, match='mu must be at least 0'):
    averaging.averaging(toy.task(), averaging.supervised(toy.task()),
                        streams='labeled', mu=-1.0)


@pytest.mark.parametrize('given, words', [
    ({'epsilon': 8.0}, "dp_scope='all'"), ({'delta': 1e-5}, "dp_scope='all'"),
    ({'accountant': 'pld'}, "dp_scope='all'"),
    ({'private_steps': 1}, "dp_scope='generator'"),
    ({'epsilon': 0.0}, 'leave epsilon and dp_scope out'),
    ({'epsilon': -1.0}, 'leave epsilon and dp_scope out'),
    ({'epsilon': 0.0, 'dp_scope': 'all'}, 'leave epsilon and dp_scope out')])
def test_a_budget_without_privacy_is_refused(given, words):
  with pytest.raises(ValueError, match=words) as error:
    fedssl.fedssl(toy.task(), **given)
  assert list(given)[0] in str(error.value)
  fedssl.fedssl(toy.task())  # Defaults are no wish.


@pytest.mark.parametrize('bound, fine, bad', [
    (knobs.Bound(), (0, 3.4e38), (-1, math.nan, math.inf, 1e39)),
    (knobs.Bound(above=True), (1e-30,), (0, 1e-46, math.inf)),
    (knobs.Bound(infinite=True), (math.inf,), (math.nan, -math.inf)),
    (knobs.Bound(0, 1), (0, 1), (1.0001, -0.1, math.nan, True, 'a', [1])),
    (knobs.Bound(0, 1, below=True), (0, 0.99), (1,)),
    (knobs.Bound(2, 9, whole=True), (2, 9, 3.0), (1, 10, 2.5, math.inf))])
def test_bounds(bound, fine, bad):
  for value in fine:
    knobs.require('knob', value, bound)
  for value in bad:
    with pytest.raises(ValueError, match='knob must be .*, not '):
      knobs.require('knob', value, bound)


@pytest.mark.parametrize('text, want', [
    ('fixmatch', ''), ('fixmatch(threshold=0.9)', ''),
    ('fixmatch(threshold=0)', 'threshold=0): every unlabeled row counts'),
    ('fixmatch(threshold=1.1)', 'threshold=1.1): no unlabeled row counts'),
    ('uda(threshold=1.0)', 'threshold=1.0): no unlabeled row counts'),
    ('flexmatch(threshold=1.1)', 'every row counts'),
    ('fixmatch(unlabeled_weight=0)', 'unlabeled rows teach is off'),
    ('fixmatch(mu=0.1)', "mu=0.1): does nothing with server='fedavg'"),
    ("fixmatch(mu=0.1, server='fedprox')", ''),
    ('fedprox(mu=0)', 'the pull to the received model is off'),
    ('pseudo_label(threshold=0.5)', "does nothing with form='soft'"),
    ("feddure(profile='official', hidden=3)",
     "hidden=3): does nothing with profile='official'"),
    ('mixmatch(ramp=None)', '')])
def test_what_is_off_is_said(text, want):
  said = knobs.notes(text, methods.METHODS)
  assert len(said) == (1 if want else 0)
  assert want in ''.join(said)
  methods.make(text, toy.task())  # It is said, not refused.


def test_a_bound_of_no_knob_is_a_mistake():
  with pytest.raises(TypeError, match='no knob sizes'):
    @knobs.checked(sizes=knobs.Bound())
    def _build(*, size: int = 1) -> int:
      return size


def test_a_word_may_have_the_name_of_a_number():
  methods.make("fedlabel(confidence='entropy')", toy.task())
  with pytest.raises(ValueError, match='confidence'):
    methods.make("fedirm(confidence='entropy')", toy.task())


def test_builders_keep_their_names():
  assert pseudo_label.pseudo_label.__name__ == 'pseudo_label'
  assert 'threshold' in inspect.signature(fixmatch.fixmatch).parameters
