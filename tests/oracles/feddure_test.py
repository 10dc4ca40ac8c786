"""FedDure's profile 'official' computes what its authors' code did.

See `make_feddure`. Of the paper's equations, which are the profile 'paper',
that code has only the network of the fine regulator.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import optimizers, tree
from fedjax_ssl.core.types import Client, Federation, Task, Variables
from fedjax_ssl.methods.feddure import meta_labels, regulation
from fedjax_ssl.testing import keys
from tests.oracles import ours

STORED = ours.stored('feddure')
CLIENTS = STORED['clients'].tolist()
RUNS = pytest.mark.parametrize('run', range(len(STORED['schedules'])))


def _task() -> Task:
  unlabeled_batch, = np.unique(STORED['unlabeled_batches'])
  return ours.task(
      STORED, 0, model=ours.perceptron(STORED, 'batch'),
      cohort_size=len(CLIENTS), labeled_batch=int(STORED['batch']),
      unlabeled_batch=int(unlabeled_batch), optimizer=optimizers.make(
          'adam', learning_rate=float(STORED['rate'])))


def _data() -> Federation:
  return ours.federation(
      STORED['inputs'], STORED['labels'], STORED['b1'].size, *CLIENTS)


def _hold(model: Variables, name: str, *place: int) -> None:
  for part, names in ((model.params, ours.weights(STORED)),
                      (model.stats, ('mean', 'variance'))):
    ours.close(part, {k: STORED[f'{name}_{k}'][place] for k in names})


@RUNS
def test_rounds_of_two_clients(run: int):
  """Rewards have the paper's sign and count by labeled rows."""
  fine_tune, main_steps, warmup, wait = STORED['schedules'][run].tolist()
  size = int(STORED['batch'])
  rows = np.array([[min(size, n - size * (i % -(-n // size)))
                    for i in range(main_steps)] for n, _ in CLIENTS])
  with ours.in_order():
    method = methods.make(
        f"feddure(profile='official', threshold={STORED['threshold']}, "
        f'fine_tune_steps={fine_tune}, main_steps={main_steps}, '
        f'warmup_steps={warmup}, wait_steps={wait})', _task())
    state = None
    for i, rises in enumerate(STORED[f'rewards{run}']):
      state, metrics = ours.one_round(method, _data(), i, state)
      _hold(state.server.model, 'after', run, i)
      found = ours.means(metrics)
      ours.close(found['reward'], -(rises * rows).sum() / rows.sum(), 1e-8)
      assert 0 < found['mask_rate'] < 1  # Some rows are not sure.


@RUNS
def test_the_teacher_and_the_student_of_a_client(run: int):
  with ours.in_order():
    data, task = _data(), _task()
    learner, _ = meta_labels.train(
        task, meta_labels.Schedule(*STORED['schedules'][run].tolist()),
        task.model.init(keys.key(0)), Client(
            jnp.int32(0), tree.take(data.clients, 0), (), data.train,
            data.validation, jnp.int32(0), jnp.int32(0)), keys.key(1),
        threshold=float(STORED['threshold']))
    _hold(learner.teacher, 'teacher', run)
    ours.close(learner.student, {
        k: STORED[f'student_{k}'][run] for k in ours.weights(STORED)})


def test_the_network_of_the_fine_regulator_and_its_gradients():
  def fine(suffix: str = '') -> regulation.Fine:
    kernel, bias, out_kernel, out_bias = (
        jnp.asarray(STORED[f'fine{i}{suffix}']) for i in range(4))
    return regulation.Fine(kernel.T, bias, out_kernel[0], out_bias[0])

  def total(fine, logits):
    made = regulation.row_weights(fine, logits)
    return made.sum(), made

  with ours.in_order():
    (_, made), slopes = jax.jit(jax.value_and_grad(
        total, (0, 1), has_aux=True))(fine(), jnp.asarray(STORED['logits']))
    for mine, theirs in zip(slopes[0], fine('_slope'), strict=True):
      ours.close(mine, theirs, 1e-9)
  ours.close(made, STORED['row_weights'], 1e-9)
  ours.close(slopes[1], STORED['logits_slope'], 1e-9)
