"""A rule of the user's replaces the mean of a round, and nothing else."""
from __future__ import annotations

import dataclasses
import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import aggregation, methods
from fedjax_ssl.core import checks, tree
from fedjax_ssl.methods.parts import aggregators
from tests import toy
from tests.thorough import wider

KEY = toy.key(3)
# Methods whose server does more than to add a mean.
OWN = {'fedmatch': {}, 'fedrgd': {}, 'fedtrinet': {}, 'rscfed': {},
       "fedlabel(combine='apart')": {},
       "fedssl(dp_scope='all')": {'cohort_size': toy.NUM_CLIENTS},
       "fixmatch(server='local')": {}, 'local': {}}
# A message with a part of each client's that no rule sees.
REGULAR = ('proxyfl',)
TAKERS = tuple(sorted(
    {*methods.METHODS} - {*OWN} - {'fedlabel'}
    | {"fedlabel(combine='mean')"}))


def _round(made, place='clients'):
  federation, _ = toy.federation(place)
  state = made.init(KEY, federation)
  return state, *jax.jit(made.round)(state, federation, jnp.int32(0), KEY)


def nothing(stacked, weights):
  """A rule that moves nothing."""
  del weights
  return tree.zeros_like(jax.tree.map(lambda x: x[0], stacked))


@pytest.mark.parametrize('text, place, model', [
    *[(name, 'clients', 'linear') for name in REGULAR],
    ('fixmatch', 'server', 'linear'),
    *wider(('fixmatch', 'clients', 'static'),
           ('fedavg(keep_local=True)', 'clients', 'linear'), *(
        (name, 'clients', 'linear') for name in TAKERS
        if name not in REGULAR))])
def test_the_mean_as_a_rule_is_the_mean(text, place, model):
  task = toy.task(model, labels_at=place)
  _, plain, metrics = _round(methods.make(text, task), place)
  _, ruled, more = _round(methods.make(
      text, task, aggregator=aggregation.weighted_mean), place)
  chex.assert_trees_all_close(plain, ruled, rtol=1e-5, atol=1e-6)
  assert set(metrics) == set(more)


@pytest.mark.parametrize('text', OWN)
def test_others_refuse_one(text):
  task = toy.task(**OWN[text])
  methods.make(text, task)
  with pytest.raises(ValueError, match='leave aggregator out'):
    methods.make(text, task, aggregator=nothing)


def test_a_rule_of_the_method_is_not_named_another():
  """Else a run would be called by the rule that --aggregator asks for."""
  with pytest.raises(ValueError, match=(
      'an aggregator of its own.*leave aggregator out')):
    methods.make('fedavg', toy.task(aggregator=aggregators.make('median')),
                 aggregator=nothing)
  with checks.stored():  # Runs go on that were begun so.
    methods.make('fedavg', toy.task(aggregator=aggregators.make('median')),
                 aggregator=nothing)


def unreduced(stacked, weights):
  del weights
  return stacked


def swapped(weights, stacked):
  return jax.tree.map(lambda x: weights @ x, stacked.params)


def absent(stacked, weights):
  del stacked, weights


def parameters_alone(stacked, weights):
  return aggregation.weighted_mean(stacked, weights).params


def narrow(stacked, weights):
  return jax.tree.map(lambda x: x.astype(jnp.float16),
                      aggregation.weighted_mean(stacked, weights))


def fewer(stacked, weights):
  mean = aggregation.weighted_mean(stacked, weights)
  return mean._replace(params={})


def words(stacked, weights):
  del weights
  return jax.tree.map(lambda x: 'a word', stacked)


def one_argument(stacked):
  return stacked


def scaled(stacked, weights, *, by):
  return jax.tree.map(lambda x: x[0] * by.real, stacked)


@pytest.mark.parametrize('rule, said', [
    (unreduced, r"gives params.*\['bias'\] as float32\[\d, 3\], not "
     r'float32\[3\]; a rule takes .* one update \(at .*ator_test.py:\d+\)[.]'),
    (swapped, r'AttributeError: .* params \(at .*aggregator_test.py:\d+\)'),
    (absent, 'gives NoneType, not Variables; '),
    (parameters_alone, 'gives dict, not Variables; '),
    (narrow, r"\['bias'\] as float16\[3\], not float32"),
    (fewer, 'gives Variables with other arrays'),
    (words, 'gives .* as str, not float32'),
    (one_argument, 'TypeError: .*1 positional argument but 2 were given'),
    (functools.partial(scaled, by='much'), "AttributeError: 'str' object")],
    ids=lambda x: getattr(x, '__name__', ''))
@pytest.mark.parametrize('whence', ['make', 'task'])
def test_a_broken_rule_is_named_in_one_line(rule, said, whence):
  task = toy.task()
  if whence == 'make':
    made = methods.make('fixmatch', task, aggregator=rule)
  else:
    made = methods.make('fixmatch', dataclasses.replace(task, aggregator=rule))
  federation, _ = toy.federation()
  with pytest.raises(ValueError, match=said) as error:
    jax.eval_shape(lambda key: made.round(
        made.init(key, federation), federation, jnp.int32(0), key), KEY)
  name = getattr(rule, '__name__', 'scaled')
  assert str(error.value).startswith(f'aggregator={name}: ')
  assert '\n' not in str(error.value)


def test_arrays_of_the_host_are_an_update_too():
  """Its double precision becomes the single one of the updates."""
  def of_the_host(stacked, weights):
    del weights
    return jax.tree.map(lambda x: np.zeros(x.shape[1:]), stacked)
  before, after, _ = _round(methods.make(
      'fixmatch', toy.task(), aggregator=of_the_host))
  chex.assert_trees_all_equal(before.server.model, after.server.model)


def test_what_the_server_keeps_besides_is_averaged_all_the_same():
  """FedIRM's class relations, of which no rule for models has an idea."""
  before, after, _ = _round(methods.make(
      'fedirm', toy.task(cohort_size=toy.NUM_CLIENTS), aggregator=nothing))
  chex.assert_trees_all_equal(before.server.model, after.server.model)
  assert after.server.relation.any()


def test_the_server_still_trains_on_its_labels():
  """Where clients move nothing, what moves is the server."""
  before, after, metrics = _round(methods.make(
      'fixmatch', toy.task(labels_at='server'), aggregator=nothing), 'server')
  gap = tree.subtract(before.server.model, after.server.model)
  assert tree.global_norm(gap) > 0 and metrics['server_loss'].total > 0
  before, after, _ = _round(methods.make(
      'fixmatch', toy.task(), aggregator=nothing))
  chex.assert_trees_all_equal(before.server.model, after.server.model)


def test_static_statistics_are_still_recomputed():
  before, after, _ = _round(methods.make(
      'fedavg', toy.task('static'), aggregator=nothing))
  chex.assert_trees_all_equal(
      before.server.model.params, after.server.model.params)
  gap = tree.subtract(before.server.model.stats, after.server.model.stats)
  assert tree.global_norm(gap) > 0


def test_under_a_falling_rate_too():
  before, after, _ = _round(methods.make(
      "fedavg(lr_decay='plateau')", toy.task(), aggregator=nothing))
  chex.assert_trees_all_equal(before.server.model, after.server.model)
  assert (after.memory.rate.best < before.memory.rate.best).any()


@pytest.mark.parametrize('name', sorted(
    {*aggregators.AGGREGATORS} & {*aggregation.__all__}))
def test_a_rule_by_name_has_the_defaults_of_the_function(name):
  by_name, alone = (
      {p.name: p.default for p in inspect.signature(rule).parameters.values()
       if p.kind is p.KEYWORD_ONLY}
      for rule in (aggregators.AGGREGATORS[name], getattr(aggregation, name)))
  assert by_name == alone


@pytest.mark.parametrize('name', sorted(aggregators.AGGREGATORS))
def test_a_rule_has_the_defaults_of_the_function_it_is(name):
  function = getattr(aggregation, name, None)
  if function is not None:
    theirs = inspect.signature(function).parameters
    assert all(theirs[knob].default == ours.default for knob, ours in (
        inspect.signature(aggregators.AGGREGATORS[name]).parameters.items()))
