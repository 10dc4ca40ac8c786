"""FedIRM computes what its authors' code did; see `make_fedirm`."""
from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_ssl import losses, methods
from fedjax_ssl.core import optimizers
from fedjax_ssl.testing import keys
from tests.oracles import ours

STORED = ours.stored('fedirm')


def test_the_relation_matrix_its_distance_and_its_gradient():
  def distance(logits):
    matrix = losses.relation_matrix(logits, jnp.asarray(STORED['classes']))
    return losses.relation_matching(matrix, STORED['target'])[0], matrix

  with ours.in_order():
    (value, matrix), slope = jax.jit(jax.value_and_grad(
        distance, has_aux=True))(jnp.asarray(STORED['logits']))
  ours.close(matrix, STORED['matrix'], 1e-7)
  ours.close(value, STORED['distance'], 1e-7)
  ours.close(slope, STORED['gradient'], 1e-7)


def test_four_rounds_with_warm_up_and_teachers():
  known, other = STORED['labeled'].tolist(), STORED['unlabeled'].tolist()
  num_rounds = len(STORED['matrices'])
  text = (f"fedirm(profile='official', warmup={STORED['warmup'] / num_rounds}, "
          f"ramp={STORED['ramp'] / num_rounds})")
  data = ours.federation(
      STORED['inputs'], STORED['labels'], 5, *((n, 0) for n in known),
      *((0, n) for n in other))
  with ours.in_order():
    task = ours.task(
        STORED, 0, weak=ours.in_turns(2), cohort_size=len(known + other),
        labeled_batch=int(STORED['batch']), schedule_rounds=num_rounds,
        unlabeled_batch=int(STORED['batch']), optimizer=optimizers.make(
            'adam', learning_rate=float(STORED['rate']), weight_decay=5e-4))
    method = methods.make(text, task)
    state = method.init(keys.key(0), data)
    # As rounds return it, so that one program runs them all.
    state = state._replace(server=state.server._replace(
        relation=state.server.relation.astype(float)))
    run = jax.jit(method.round)
    for i in range(num_rounds):
      state = state._replace(round=jnp.int32(i))
      state, metrics = run(state, data, jnp.int32(i), keys.key(i))
      ours.close(state.server.model.params,
                 {k: v[i] for k, v in ours.weights(STORED, 'after_').items()})
      ours.close(state.server.relation, STORED['matrices'][i])
      active = STORED['losses'][i][STORED['losses'][i] > 0]
      ours.close(ours.means(metrics)['train_loss'], active.mean())
    ours.close({k: v[len(known)] for k, v in
                state.memory.teacher.params.items()},
               ours.weights(STORED, 'teacher_'))
    assert 0 < ours.means(metrics)['mask_rate'] < 1  # Some are not sure.
