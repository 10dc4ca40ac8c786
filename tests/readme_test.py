"""README's example of a method is a method: it passes where labels may live."""
from __future__ import annotations

import re

import chex
import jax
import jax.numpy as jnp
import pytest

from fedjax_ssl import methods, models
from tests import toy


def _example(root):
  text = (root / 'README.md').read_text('utf-8')
  block, = re.findall(r'```python\n("""fedjax_ssl/methods/entropy.*?)```', text,
                      re.DOTALL)
  scope: dict = {}
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
  assert toy.means(metrics)['doubt'] > 0


def test_every_method_and_model_is_named(root):
  text = (root / 'README.md').read_text('utf-8')
  for name in (*methods.METHODS, *models.MODELS):
    assert f'`{name}`' in text, name
