"""Rules whose clients are spread over devices give what one device gives."""
from __future__ import annotations

_CODE = """
import functools
import jax, chex, numpy as np
from jax.sharding import PartitionSpec as P
from fedjax_ssl import aggregation as rules

rng = np.random.default_rng(0)
updates = {'w': rng.normal(size=(8, 3, 2)).astype(np.float32),
           'b': rng.normal(size=(8,)).astype(np.float32),
           'half': rng.normal(size=(8, 2)).astype(np.float16),
           'steps': np.arange(8, dtype=np.int32), 'none': {}}
updates['b'][2] = np.nan  # Of a client that does not count.
some = np.array([10, 20, 0, 5, 7, 0, 0, 1], np.float32)
labeled = np.array([1, 0, 0, 0, 0, 0, 1, 1], bool)
distance = rules.distance_reweighted_mean
cases = [(rules.weighted_mean, {}), (rules.reliability_weighted_mean, {}),
         (distance, {'beta': 3.0, 'distance': 'global_norm'}),
         (distance, {'beta': 1e4}), (distance, {'beta': np.inf}),
         (distance, {'beta': 0.5, 'labeled_multiplier': 6.0})]

def slopes(mean, stacked, weights):
  floats = {k: v for k, v in stacked.items() if k in 'wb'}
  def loss(floats, weights):
    out = mean({**stacked, **floats}, weights)
    return (out['w'] ** 2).sum() + out['b'] ** 2
  return jax.jit(jax.grad(loss, (0, 1)))(floats, weights)

for rule, knobs in cases:
  multiplied = 'labeled_multiplier' in knobs
  more = (labeled,) if multiplied else ()
  def alone(stacked, weights, *more, **axis):
    extra = {'labeled': more[0]} if more else {}
    return rule(stacked, weights, **knobs, **extra, **axis)
  for weights in (some, np.zeros(8, np.float32)):
    want = alone(updates, weights, *more)
    for devices in (1, 2, 4):
      mesh = jax.make_mesh((devices,), ('clients',),
                           devices=jax.devices()[:devices],
                           axis_types=(jax.sharding.AxisType.Auto,))
      spread = jax.shard_map(
          functools.partial(alone, axis_name='clients'), mesh=mesh,
          in_specs=P('clients'), out_specs=P())
      got = jax.jit(spread)(updates, weights, *more)
      chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
      chex.assert_trees_all_close(got, want, rtol=2e-5, atol=1e-6)
    if not multiplied and weights.any():
      finite = {**updates, 'b': np.nan_to_num(updates['b'])}
      chex.assert_trees_all_close(
          slopes(spread, finite, weights), slopes(alone, finite, weights),
          rtol=1e-4, atol=1e-6)
  halves = jax.tree.map(lambda x: x.reshape(2, 4, *x.shape[1:]),
                        (updates, some, *more))
  both = jax.pmap(functools.partial(alone, axis_name='i'), axis_name='i')(
      *halves)
  for i in range(2):
    chex.assert_trees_all_close(
        jax.tree.map(lambda x: x[i], both), alone(updates, some, *more),
        rtol=2e-5, atol=1e-6)
"""


def test_spread_over_1_2_or_4_devices(run_python):
  run_python(_CODE, devices=4)
