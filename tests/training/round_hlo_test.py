"""The compiled round of a real method on two devices, read as text."""
from __future__ import annotations

_CODE = r"""
import functools, re
import jax
import jax.numpy as jnp
from fedjax_ssl import methods
from fedjax_ssl.core import tree
from fedjax_ssl.training import seeds
from tests import toy

mesh = jax.make_mesh((2,), ('clients',),
                     axis_types=(jax.sharding.AxisType.Auto,))
method = methods.make('fixmatch', toy.task('conv', mesh=mesh))
federation, _ = toy.federation()
state = method.init(jax.random.key(0), federation)
totals = tree.zeros_like(seeds.totals_shape(method, federation, state))
run = jax.jit(functools.partial(seeds.stretch, method))
text = run.lower(state, totals, federation, jnp.int32(0), jnp.int32(1),
                 jax.random.key(1)).compile().as_text()
assert 'num_partitions=2' in text
# Block sums have the shapes of the model, results are a number a slot.
allowed = {leaf.size for leaf in jax.tree.leaves(state.server)}
slots = 4
gathers = re.findall(r'= \(?([^=]*?)\)? all-gather(?:-start)?\(', text)
assert gathers
for shapes in gathers:
  for dims in re.findall(r'\w+\[([\d,]*)\]', shapes):
    size = 1
    for d in filter(None, dims.split(',')):
      size *= int(d)
    assert size <= slots or size in allowed or size / 2 in allowed, shapes
for word in ('all-to-all', 'collective-permute', 'reduce-scatter'):
  assert f' {word}(' not in text, word
assert 'feature_group_count' not in text
assert 'batch_group_count' not in text
print('small gathers:', len(gathers))
"""


def test_devices_exchange_sums_and_results_only(run_python):
  """No convolution is split between devices, and none is grouped."""
  output = run_python(_CODE, devices=2)
  assert output.startswith('small gathers:')
