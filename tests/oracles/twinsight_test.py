"""Twin-sight computes what its authors' code did; see `make_twinsight`."""
from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core.types import State, Variables
from fedjax_ssl.methods import twinsight
from fedjax_ssl.methods.parts import assemble
from tests.oracles import ours
from tests.thorough import wider

STORED = ours.stored('twinsight')
KNOWN, UNKNOWN = int(STORED['known']), int(STORED['unknown'])
NAMES = sorted(k for k in STORED if k[:2] in ('s_', 'u_', 'p_')
               and k not in ('u_w1', 'u_b1'))  # A projector has their place.


def _start(prefix: str) -> dict[str, np.ndarray]:
  return {k.removeprefix(prefix): v for k, v in STORED.items()
          if k.startswith(prefix)}


def _after(run: str) -> dict[str, np.ndarray]:
  """The numbers that one of the runs led to, by name."""
  ends = np.cumsum([STORED[name].size for name in NAMES])[:-1]
  return {name: part.reshape(STORED[name].shape) for name, part in zip(
      NAMES, np.split(STORED[run], ends), strict=True)}


def _variables() -> Variables:
  """Both networks and the projector as `twinsight.twins` has them."""
  supervised = ours.perceptron(_start('s_'), 'batch')
  first = supervised.init(jax.random.key(0))
  other = ours.perceptron(_start('u_'), 'batch').init(jax.random.key(0))
  del other.params['w1']
  top = _start('p_')
  params = {'Dense_0': {'kernel': top['w0'], 'bias': top['b0']},
            'Norm_0': {k: top[k] for k in ('scale', 'bias')},
            'Dense_1': {'kernel': top['w1'], 'bias': top['b1']}}
  stats = {'Norm_0': {k: top[k] for k in ('mean', 'variance')}}
  made = {'supervised': first, 'unsupervised': other,
          'projector': Variables(params, stats)}
  return jax.tree.map(jnp.asarray, Variables(
      {k: v.params for k, v in made.items()},
      {k: v.stats for k, v in made.items()}))


def _named(model: Variables) -> dict[str, Any]:
  """The same by their stored names."""
  out = {}
  for prefix, name in (('s_', 'supervised'), ('u_', 'unsupervised')):
    part = twinsight.part(model, name)
    out.update({prefix + k: v for k, v in part.params.items()})
    out.update({prefix + k: v for k, v in part.stats.items()})
  top = twinsight.part(model, 'projector')
  for i in (0, 1):
    layer = top.params[f'Dense_{i}']
    out.update({f'p_w{i}': layer['kernel'], f'p_b{i}': layer['bias']})
  for part in (*top.params['Norm_0'].items(), *top.stats['Norm_0'].items()):
    out[f'p_{part[0]}'] = part[1]
  return out


def _round(text: str, clients: list[tuple[int, int]]
           ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """A round from the stored weights: the weights after it, the metrics."""
  data = ours.federation(STORED['inputs'], STORED['labels'],
                         STORED['s_b1'].size, *clients)
  batch = int(STORED['batch'])
  with ours.in_order():
    method = methods.make(text, ours.task(
        _start('s_'), 0, model=ours.perceptron(_start('s_'), 'batch'),
        cohort_size=len(clients), labeled_batch=batch, unlabeled_batch=batch,
        optimizer=ours.descent(STORED)))
    assert method.predict is not None
    state, metrics = ours.one_round(method, data, state=State(
        assemble.Server(_variables()),
        method.init(jax.random.key(0), data).memory, jnp.int32(0)))
    return _named(state.server.model), ours.means(metrics)


@pytest.mark.parametrize('run, taught', [
    ('taught', True), *wider(('plain', False))])
def test_a_client_with_labels_and_one_without(run, taught):
  threshold = float(STORED['threshold'])
  text = ("twinsight(profile='code', "
          f'unlabeled_weight={0.5 * taught}, threshold={threshold})')
  model, metrics = _round(text, [(KNOWN, 0), (0, UNKNOWN)])
  ours.close(model, _after(run))
  told = STORED[f'{run}_told'].reshape(2, 3)
  rows = np.array([KNOWN, UNKNOWN])
  ours.close(metrics['labeled_loss'], told[0, 0])
  if taught:
    assert 0 < metrics['mask_rate'] < 1
    ours.close(metrics['unlabeled_loss'], told[1, 0])
  for name, column in (('contrastive_loss', 1), ('neighbourhood_loss', 2)):
    ours.close(metrics[name], rows @ told[:, column] / rows.sum())


def test_a_client_with_labels_of_some_rows_beside_fedprox():
  number = {k: float(STORED[k]) for k in ('mu', 'threshold', 'partly_weight')}
  text = ("twinsight(profile='code', label_view='weak', server='fedprox', "
          'mu={mu}, threshold={threshold}, unlabeled_weight={partly_weight})'
          ).format(**number)
  model, _ = _round(text, [(KNOWN, UNKNOWN)])
  ours.close(model, _after('partly'))
