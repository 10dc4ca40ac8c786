"""The received model labels rows of all clients in one ordinary convolution.

Its weights are the same for all of them. Under vmap their rows are then one
batch; the models in training have weights of their own, so their convolutions
have as many groups as there are clients.
"""
from __future__ import annotations

import dataclasses
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from fedjax_ssl import methods
from fedjax_ssl import task as task_lib
from fedjax_ssl.methods.parts import averaging
from tests import hlo, toy
from tests.thorough import wider
from tests.training import networks

TOGETHER = 2


def _convolutions(text, model=None):
  """Of a round of clients that train under one vmap."""
  federation, _ = toy.federation()
  task = dataclasses.replace(
      toy.task(client_map='vmap', chunk_size=TOGETHER),
      model=model or networks.reordered('lax'))
  method = methods.make(text, task)
  state = jax.eval_shape(
      lambda key: method.init(key, federation), toy.key(0))
  return hlo.convolutions(jax.jit(method.round).lower(
      state, federation, jnp.int32(0), toy.key(1)).as_text())


def _shared(text):
  """Rows of each convolution without groups."""
  found = _convolutions(text)
  assert any(groups == TOGETHER for groups, *_ in found)
  assert {groups for groups, *_ in found} <= {1, TOGETHER}
  return [rows for groups, (rows, *_), kernel in found if groups == 1]


@pytest.mark.parametrize('text, rows', [
    ('fixmatch', None), ("fixmatch(labeler='global')", 4), ('sage', 4),
    ('steadymatch', 4),
    ('proxyfl', 7), ('proxyfl(true_labels=True)', 4),
    ('proxyfl(contrast_weight=0.0)', 4), ('semifl', 12), ('feddb', 12),
    ("fedlabel(labeler='global')", 4), ('cbafed', 12)])
def test_the_received_model_sees_all_clients_rows_as_one_batch(text, rows):
  """`rows` of each client: the 4 unlabeled ones of a step, with the 3 others.

  Or all its unlabeled ones, which are labeled before the first step.
  """
  assert _shared(text) == ([] if rows is None else [TOGETHER * rows])


def test_fl2_also_sees_the_labeled_rows_of_clients_with_labels_alone():
  assert _shared('fl2') == [TOGETHER * 12, TOGETHER * 3]


@pytest.mark.parametrize('text, rows, passes', [
    ('semifl', 12, 3), *wider(('sage', 4, 1), ('feddb', 12, 3))])
def test_so_it_is_with_statistics_that_the_server_sends(text, rows, passes):
  """And in `semifl` and `feddb` to compute these, first and after a round."""
  shape = toy.federation()[0].train.inputs.shape[1:]
  model = task_lib.make_task(task_lib.TaskSpec(
      num_classes=toy.NUM_CLASSES, input_shape=shape, model='cnn(width=2)',
      norm='static', conv_impl='lax')).model
  found = _convolutions(text, model)
  shared = [inputs[0] for groups, inputs, _ in found if groups == 1]
  # The network has two layers.
  assert shared.count(TOGETHER * rows) == 2 * passes
  assert any(groups == TOGETHER for groups, *_ in found)


def test_a_model_for_each_client_is_found():
  """What a client receives must not depend on who it is."""
  whole = averaging._broadcast

  def own(s, record, client_id, group):
    return jax.tree.map(lambda x: x + 0 * client_id, whole(
        s, record, client_id, group))
  with mock.patch.object(averaging, '_broadcast', own):
    assert not _shared('sage')
