"""README's examples do what README says."""
from __future__ import annotations

import re
import runpy

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_ssl
from fedjax_ssl.running import settings
from fedjax_ssl.training import loop
from tests import toy


def _example(root):
  text = (root / 'README.md').read_text('utf-8')
  block, = re.findall(r'```python\n("""entropy.py: .*?)```', text,
                      re.DOTALL)
  scope: dict = {'__name__': '__main__'}
  exec(block, scope)  # The repository's own text.
  return scope['entropy']


@pytest.mark.parametrize('place', ['clients', 'server'])
def test_the_example_trains(root, place):
  federation, _ = toy.federation(place)
  method = _example(root)(toy.task(labels_at=place), weight=0.2)
  state = method.init(jax.random.key(0), federation)
  after, metrics = jax.jit(method.round)(
      state, federation, jnp.int32(0), jax.random.key(1))
  chex.assert_tree_all_finite((after, toy.means(metrics)))
  assert toy.means(metrics)['unlabeled_loss'] > 0
  assert 'entropy' in fedjax_ssl.METHODS


def _rule(root):
  text = (root / 'README.md').read_text('utf-8')
  block, = re.findall(r'```python\n("""median.py, .*?)```', text,
                      re.DOTALL)
  scope: dict = {}
  exec(block, scope)  # The repository's own text.
  return scope


def test_the_rule_is_a_median_of_those_with_a_say(root):
  median = _rule(root)['medians']
  rows = {'w': jnp.array([[1., 9.], [3., 7.], [1e9, -1e9], [2., 8.]])}
  heard = median(rows, jnp.array([1., 5., 0., 2.]))['w']
  chex.assert_trees_all_close(heard, jnp.array([2., 8.]))
  nobody = median(rows, jnp.zeros(4))['w']
  chex.assert_trees_all_equal(nobody, jnp.zeros(2))
  same = median({'w': jnp.full((4, 2), 3.)}, jnp.ones(4))['w']
  chex.assert_trees_all_equal(same, jnp.full(2, 3.))


def test_the_rule_trains(root):
  federation, _ = toy.federation()
  method = _rule(root)['median_fixmatch'](toy.task(), threshold=0.4)
  rows: list = []
  result = fedjax_ssl.train(
      method, [federation], num_rounds=8, eval_every=8,
      observer=loop.Observer(rows.append))
  chex.assert_tree_all_finite(result.states[0])
  assert rows[-1].values['accuracy'] > 0.6  # Of three classes.


def test_the_rule_keeps_the_servers_own_training(root):
  """Labels at the server: it trains on them first, whatever the rule."""
  federation, _ = toy.federation('server')
  made = _rule(root)['median_fixmatch'](
      toy.task(labels_at='server'), threshold=0.4)
  rows: list = []
  fedjax_ssl.train(made, [federation], num_rounds=8, eval_every=8,
                   observer=loop.Observer(rows.append))
  assert rows[-1].values['accuracy'] > 0.6  # Nobody else sees a label.
  assert rows[-1].values['server_loss'] > 0


def test_a_rule_and_a_loss_run(root):
  text = (root / 'README.md').read_text('utf-8')
  block, = re.findall(r'```python\n(import jax.numpy as jnp\nfrom .*?)```',
                      text, re.DOTALL)
  scope: dict = {}
  exec(block, scope)  # The repository's own text.
  chex.assert_trees_all_close(scope['mean'], {'w': jnp.ones(3)})
  chex.assert_trees_all_close(scope['near'], {'w': jnp.ones(3)})
  # Four sure rows, of a student that knows nothing of ten classes.
  chex.assert_trees_all_close(scope['loss'], jnp.log(10.))


def test_the_example_without_flags_runs(root, monkeypatch, capsys):
  rounds = []
  def train(_, federation, *, num_rounds):
    rounds.append((federation, num_rounds))
    return loop.Result([], num_rounds, False, {'accuracy': np.ones(1)})
  monkeypatch.setattr(fedjax_ssl, 'train', train)
  scope = runpy.run_path(
      str(root / 'experiments' / 'examples' / 'without_flags.py'))
  (federation, num_rounds), = rounds
  assert num_rounds and scope['task'].schedule_rounds is None
  assert f'{num_rounds} rounds are only a look' in capsys.readouterr().out
  scope['method'].init(jax.random.key(0), federation)


def test_it_counts_methods_and_names_every_setting(root):
  text = (root / 'README.md').read_text('utf-8')
  assert f'[{len(fedjax_ssl.METHODS)} methods]' in text
  assert f'in {len(settings.SETTINGS)} settings' in text
  assert not [name for name in settings.SETTINGS if f'`{name}`' not in text]
