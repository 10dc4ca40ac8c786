"""SemiFL: what it reduces to, who sits out, statistics, a round by hand."""
from __future__ import annotations

import dataclasses
import functools
import re
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import tree
from fedjax_ssl.core.types import Client
from fedjax_ssl.data import batching
from fedjax_ssl.methods import semifl
from fedjax_ssl.methods.parts import all_statistics, assemble, labeling
from tests import toy
from tests.by_hand import softmax
from tests.methods import alternate_rounds, updates
from tests.methods.alternate_rounds import RATE
from tests.methods.alternate_rounds import task as _task
from tests.training import networks

KEY = toy.key(4)
_rounds = functools.partial(alternate_rounds.rounds, KEY)


def _momentum(round_):
  del round_
  return optax.sgd(RATE, momentum=0.9)


def test_without_confident_rows_the_server_trains_alone():
  """Nobody takes part, and the server's momentum is not touched."""
  task = _task(optimizer=_momentum)
  first, after, metrics = _rounds(
      'semifl(threshold=1.1, keep_momentum=False, clip_norm=1e999)', 2, task)
  _, alone, _ = _rounds('fedavg', 2, task)
  chex.assert_trees_all_close(after.server.own.model, alone.server.model,
                              rtol=1e-5, atol=1e-6)
  chex.assert_trees_all_equal(after.server.added, first.server.added)
  assert metrics['num_participants'] == 0
  assert toy.means(metrics)['mask_rate'] == 0
  assert metrics['server_loss'].rows == 1


def test_without_clients_the_momentum_of_the_server_rests():
  """What earlier rounds left in it moves the model in no round of nobody."""
  federation, _ = toy.federation('server')
  task = _task(optimizer=_momentum)
  method = methods.make(
      'semifl(threshold=1.1, keep_momentum=False, clip_norm=1e999)', task)
  still = method.init(KEY, federation)
  moving = still._replace(server=still.server._replace(
      added=jax.tree.map(lambda x: x + 3, still.server.added)))
  run = jax.jit(method.round)
  a, b = (run(state, federation, jnp.int32(0), KEY)[0].server
          for state in (still, moving))
  chex.assert_trees_all_equal(a.own, b.own)
  chex.assert_trees_all_equal(b.added, moving.server.added)
  assert tree.global_norm(moving.server.added) > 3


def test_without_a_threshold_every_row_is_learnt():
  _, after, metrics = _rounds('semifl(threshold=0)', 1,
                              _task(optimizer=_momentum))
  assert toy.means(metrics)['mask_rate'] == 1
  assert metrics['num_participants'] == np.sum(np.array(toy.UNLABELED) > 0)
  # Each row is labeled once, and learnt in two views.
  rows = sum(toy.UNLABELED)
  assert metrics['forward_passes'].total == 3 * rows
  assert metrics['backward_passes'].total == 2 * rows
  assert tree.global_norm(after.server.added) > 0


def _client(federation, i):
  i = jnp.int32(i)
  return Client(i, tree.take(federation.clients, i), (),
                federation.train, federation.validation, jnp.int32(0),
                jnp.int32(0))


def test_who_is_not_sure_sits_out_and_keeps_what_it_has():
  """tau between the surest rows of two clients."""
  federation, _ = toy.federation('server')
  task = _task(optimizer=_momentum)
  made = methods.make('semifl', task)
  model = made.init(KEY, federation).server.own.model
  label = jax.jit(lambda i: labeling.probabilities(
      task, model, _client(federation, i), KEY)[0].max())
  surest = [float(label(i)) for i in range(toy.NUM_CLIENTS)]
  low, high = sorted(surest)[-2:]
  assert low < high
  first, after, metrics = _rounds(f'semifl(threshold={(low + high) / 2})', 1,
                                  task)
  assert metrics['num_participants'] == 1
  moved = jax.tree.leaves(jax.tree.map(
      lambda x, y: (x != y).reshape(len(x), -1).any(-1),
      first.memory.own, after.memory.own))
  np.testing.assert_array_equal(np.any(moved, 0), np.array(surest) == high)


def test_as_many_rows_are_mixed_in_as_are_fixed():
  """Each epoch visits FIX once; a batch of MIX has as many rows, of all."""
  federation, _ = toy.federation('server')
  task = _task(unlabeled_batch=2, local_epochs=2)
  client = _client(federation, 0)
  chosen = jnp.arange(client.shard.unlabeled.shape[0]) % 2 == 0
  shard, order = batching.select_unlabeled(client.shard, chosen)
  places = semifl.drawn(KEY, client.shard)
  assert int(places.max()) < toy.UNLABELED[0] and len({*map(int, places)}) > 2
  labels = jnp.arange(places.shape[0])
  fixed, mixed = (batching.batches(
      task, client.train, part, key, 'unlabeled', pseudo_labels=given)
      for part, key, given in zip(
          (shard, shard._replace(unlabeled=client.shard.unlabeled[places])),
          jax.random.split(KEY), (labels[order], labels[places]), strict=True))
  made = batching.together(fixed, mixed)
  following = jax.jit(made.next)
  cursor, seen = made.start(), []
  for step in range(int(made.num_steps)):
    cursor, (one, other), rows = following(cursor, jnp.int32(step))
    np.testing.assert_array_equal(one.unlabeled.mask, other.unlabeled.mask)
    assert rows == 2 * one.unlabeled.mask.sum()
    seen += [int(x) for x, m in zip(
        one.unlabeled.labels, one.unlabeled.mask, strict=True) if m]
  count = (toy.UNLABELED[0] + 1) // 2
  assert len(seen) == 2 * count and {*seen[:count]} == {*seen[count:]} == {
      *range(0, toy.UNLABELED[0], 2)}


def test_strong_views_and_blends_are_normalized_apart():
  federation, _ = toy.federation('server')
  task, sizes = _task('conv'), []
  def apply_train(model, inputs, mask, key=None):
    sizes.append(inputs.shape[0])
    return task.model.apply_train(model, inputs, mask, key)
  made = methods.make('semifl', dataclasses.replace(
      task, model=task.model._replace(apply_train=apply_train)))
  client = _client(federation, 0)
  state = made.init(KEY, federation)
  memory = tree.take(state.memory.own, 0)
  assert made.client_update is not None
  jax.eval_shape(made.client_update, assemble.Server(
      state.server.own.model), client._replace(
          memory=state.memory._replace(own=memory)), KEY)
  assert {*sizes} == {task.unlabeled_batch} and len(sizes) % 2 == 0


def test_statistics_follow_strong_views_and_then_blends():
  """With alpha 0 the blends are the rows as they are."""
  federation, _ = toy.federation('server')
  task, who = toy.task('conv'), updates.UNKNOWN
  made = methods.make('semifl', task).init(updates.KEY, federation)
  after = begun = made.server.own.model
  rows = jnp.asarray(federation.train.inputs)[
      federation.clients.unlabeled[who, :toy.UNLABELED[who]]]
  for view in (255 - rows, rows):
    _, stats = task.apply_train(after, view, jnp.ones(len(rows)))
    after = after._replace(stats=stats)
  sent = updates.whole(
      'semifl(threshold=0, alpha=0)', who, model='conv', place='server',
      strong=lambda key, x: 255 - x,
      sent=lambda record: assemble.Server(record.own.model)).message
  chex.assert_trees_all_close(
      sent.stats, tree.subtract(after.stats, begun.stats), rtol=1e-4, atol=1e-5)


def test_statistics_are_the_mean_over_the_batches_of_all(monkeypatch):
  """A client with more rows than a batch counts as often as it has batches."""
  federation, _ = toy.federation('server')
  task = _task('static')
  monkeypatch.setattr(all_statistics, '_BATCH', 12)
  model = assemble.new_model(task, KEY)
  far = model._replace(stats=jax.tree.map(lambda x: x + 3, model.stats))
  images = jnp.asarray(federation.train.inputs)

  @jax.jit
  def batch_statistics(rows, count):
    mask = jnp.arange(rows.shape[0]) < count
    return task.apply_train(model, images[rows], mask.astype(jnp.float32))[1]

  found = [batch_statistics(federation.clients.unlabeled[i], n)
           for i, n in enumerate(toy.UNLABELED) if n]
  server = federation.server.labeled[:federation.server.num_labeled]
  one = all_statistics.everywhere(task)
  state = methods.make('semifl(server_momentum=0)', task).init(KEY, federation)
  state = state._replace(server=state.server._replace(model=far))
  after, metrics = jax.jit(one)(state, federation, jnp.int32(0), KEY)
  got = after.server.model.stats
  # The server's rows make two batches, drawn at random.
  change, count = jax.jit(lambda key: all_statistics.of_rows(
      task, far, federation.train, federation.server, key))(
      jax.random.fold_in(KEY, 2))
  assert count == 2 and server.shape[0] == sum(toy.LABELED) > 12
  found += 2 * [tree.add(far.stats, change)]
  wanted = jax.tree.map(lambda *xs: sum(xs) / len(xs), *found)
  chex.assert_trees_all_close(got, wanted, rtol=1e-4, atol=1e-4)
  chex.assert_trees_all_equal(after.server.model.params, far.params)
  assert 'num_participants' not in metrics
  # Models go down to everyone, statistics alone come up, of those with rows.
  size, senders = tree.num_bytes(model), np.count_nonzero(toy.UNLABELED)
  assert metrics['bytes_down'] == toy.NUM_CLIENTS * size
  assert metrics['bytes_up'] == senders * tree.num_bytes(model.stats)


def test_each_row_counts_once_at_a_client_with_both_kinds():
  federation, _ = toy.federation('clients')
  task = _task('static')
  model = assemble.new_model(task, KEY)
  images = jnp.asarray(federation.train.inputs)
  shard = jax.tree.map(lambda x: x[0], federation.clients)
  kinds = [shard.labeled[:shard.num_labeled],
           shard.unlabeled[:shard.num_unlabeled]]
  assert 0 < kinds[0].size != kinds[1].size > 0
  change, count = jax.jit(lambda key: all_statistics.of_rows(
      task, model, federation.train, shard, key))(KEY)
  assert count == 2
  found = [task.apply_train(model, images[rows], jnp.ones(rows.size))[1]
           for rows in kinds]
  chex.assert_trees_all_close(
      tree.add(model.stats, change), tree.scale(tree.add(*found), .5),
      rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('measure', [
    all_statistics.everywhere, assemble.statistics])
def test_statistics_have_no_norm_to_limit(measure):
  federation, _ = toy.federation('clients')
  found = []
  for limit in (float('inf'), 1e-3):
    task = dataclasses.replace(_task('static'), labels_at='clients',
                               max_update_norm=limit)
    state = methods.make('fedavg', task).init(KEY, federation)
    after, metrics = jax.jit(measure(task))(state, federation, jnp.int32(0),
                                            KEY)
    assert metrics['num_rejected'] == 0
    found.append(after.server.model.stats)
  moved = tree.subtract(found[0], state.server.model.stats)
  assert tree.global_norm(moved) > 1
  chex.assert_trees_all_equal(*found)


def test_without_statistics_there_is_nothing_to_measure():
  federation, _ = toy.federation('clients')
  task = dataclasses.replace(_task('linear'), labels_at='clients')
  state = methods.make('fedavg', task).init(KEY, federation)
  for measure in (all_statistics.everywhere, assemble.statistics):
    after, _ = jax.jit(measure(task))(state, federation, jnp.int32(0), KEY)
    chex.assert_trees_all_equal(after.server, state.server)


def test_clients_that_measure_receive_the_model_alone():
  """SCAFFOLD's control stays at the server, and memory at the clients."""
  federation, _ = toy.federation('clients')
  task = dataclasses.replace(_task('static'), labels_at='clients')
  state = methods.make('scaffold', task).init(KEY, federation)
  one = assemble.statistics(task)
  after, metrics = jax.jit(one)(state, federation, jnp.int32(0), KEY)
  clients = task.cohort_size
  assert metrics['bytes_down'] == clients * tree.num_bytes(state.server.model)
  chex.assert_trees_all_equal(after.memory, state.memory)


def test_the_first_labels_come_from_a_normalized_network():
  """Statistics of the first model are there before anybody labels a row."""
  federation, _ = toy.federation('server')
  task = _task('static')
  given = []
  def apply(variables, inputs):
    jax.debug.callback(lambda stats: given.append(stats), variables.stats,
                       ordered=True)
    return task.model.apply(variables, inputs)
  made = methods.make('semifl(threshold=1.1)', dataclasses.replace(
      task, model=task.model._replace(apply=apply)))
  state = made.init(KEY, federation)
  first = state.server.own.model
  one = all_statistics.everywhere(task)
  own = state._replace(server=state.server.own, memory=state.memory.own)
  jax.block_until_ready(jax.jit(made.round)(
      state, federation, jnp.int32(0), KEY))
  after, _ = jax.jit(one)(own, federation, jnp.int32(0), KEY)
  assert given
  chex.assert_trees_all_close(given[0], after.server.model.stats, rtol=1e-3,
                              atol=1e-4)
  gap = tree.subtract(given[0], first.stats)
  assert tree.global_norm(gap) > 0.1


def test_a_pass_of_the_first_round_runs_in_no_other():
  def one(state, federation, round_, key):
    del federation, round_, key
    return state._replace(server=state.server + 1), {'bytes_up': jnp.ones(())}
  state, _ = toy.federation()
  opening = jax.jit(assemble.once(one))
  start = methods.make('fedavg', toy.task()).init(KEY, state)._replace(
      server=jnp.float32(0))
  found = [opening(start, state, jnp.int32(i), KEY) for i in range(3)]
  assert [float(s.server) for s, _ in found] == [1, 0, 0]
  assert [float(m['bytes_up']) for _, m in found] == [1, 0, 0]


def _gradient(model, x, targets):
  w, b = model
  d = (softmax(x @ w + b) - targets) / len(x)
  return x.T @ d, d.sum(0)


def test_a_round_by_hand():
  """One step a client, lambda 0.3, MIX the client's first row throughout."""
  federation, _ = toy.federation('server')
  tau, lam, most, weight = 0.4, 0.3, 0.2, 2.0
  task = _task(strong=lambda key, x: 255 - x)
  text = (f'semifl(threshold={tau}, clip_norm={most}, mix_weight={weight})')
  with (mock.patch.object(semifl.losses, 'mixup_ratio',
                          lambda key, alpha: jnp.float32(lam)),
        mock.patch.object(semifl, 'drawn',
                          lambda key, shard: 0 * shard.unlabeled)):
    first, after, metrics = _rounds(text, 1, task)

  layer = first.server.own.model.params['Dense_0']
  start = [np.array(layer[k], np.float64) for k in ('kernel', 'bias')]
  def pixels(rows):
    return np.asarray(federation.train.inputs)[rows].reshape(
        len(rows), -1).astype(np.float64)
  def ready(x):
    return x / 255 - 0.4
  def step(model, grads):
    norm = np.sqrt(sum((g**2).sum() for g in grads))
    assert norm > most  # The clip acts.
    return [p - RATE * g * most / norm
            for p, g in zip(model, grads, strict=True)]

  deltas, eye = [], np.eye(toy.NUM_CLASSES)
  for i, n in enumerate(toy.UNLABELED):
    if not n:
      continue
    raw = pixels(np.asarray(federation.clients.unlabeled)[i, :n])
    p = softmax(ready(raw) @ start[0] + start[1])
    labels, kept = p.argmax(-1), p.max(-1) >= tau
    if not kept.any():
      continue
    x, y = raw[kept], eye[labels[kept]]
    blend = lam * x + (1 - lam) * raw[:1]
    target = lam * y + (1 - lam) * eye[labels[:1]]
    grads = [a + weight * b for a, b in zip(
        _gradient(start, ready(255 - x), y),
        _gradient(start, ready(blend), target), strict=True)]
    deltas.append([q - p for q, p in zip(step(start, grads), start,
                                         strict=True)])
  assert 0 < len(deltas) == metrics['num_participants']
  middle = [p + np.mean([d[j] for d in deltas], 0)
            for j, p in enumerate(start)]
  rows = np.asarray(federation.server.labeled)[:sum(toy.LABELED)]
  end = step(middle, _gradient(
      middle, ready(pixels(rows)),
      eye[np.asarray(federation.train.labels)[rows]]))

  layer = after.server.own.model.params['Dense_0']
  np.testing.assert_allclose(layer['kernel'], end[0], rtol=1e-3, atol=1e-5)
  np.testing.assert_allclose(layer['bias'], end[1], rtol=1e-3, atol=1e-5)
  # What the next mean update is added to.
  trace = [-np.mean([d[j] for d in deltas], 0) for j in range(2)]
  momentum = sorted(jax.tree.leaves(after.server.added), key=np.ndim)
  np.testing.assert_allclose(momentum[1], trace[0], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize('steps', [0, 2])
def test_a_warm_up_is_so_many_passes_of_the_server(steps):
  """Whole batches, nobody sure: the server's steps are all there is."""
  task = _task(local_steps=steps)
  text = 'semifl(threshold=1.1, keep_momentum=False, clip_norm=1e999{})'
  _, warm, _ = _rounds(text.format(', warmup_passes=3'), 1, task)
  _, plain, _ = _rounds(text.format(''), 4, task)
  chex.assert_trees_all_close(warm.server.own, plain.server.own, rtol=1e-4,
                              atol=1e-6)


def test_optimizers_are_kept_or_not():
  task = _task(optimizer=_momentum)
  _, kept, _ = _rounds('semifl(threshold=0)', 1, task)
  _, fresh, _ = _rounds('semifl(threshold=0, keep_momentum=False)', 1, task)
  assert tree.global_norm(kept.server.own.opt_state) > 0
  assert not jax.tree.leaves((fresh.memory.own, fresh.server.own.opt_state))
  chex.assert_trees_all_equal(kept.server.own.model, fresh.server.own.model)
  _, kept, _ = _rounds('semifl(threshold=0)', 2, task)
  _, fresh, _ = _rounds('semifl(threshold=0, keep_momentum=False)', 2, task)
  gap = tree.subtract(kept.server.own.model, fresh.server.own.model)
  assert tree.global_norm(gap) > 1e-4


def test_labels_at_the_clients_are_learnt_there():
  """Of a client that is sure of nothing, they are all that it learns."""
  task = _task(labels_at='clients')
  _, ours, _ = _rounds('semifl(threshold=1.1, clip_norm=1e999)', 1, task)
  _, plain, _ = _rounds("fedavg(weighting='uniform')", 1, task)
  chex.assert_trees_all_close(ours.server.own.model, plain.server.model,
                              rtol=1e-5, atol=1e-6)


def test_under_vmap_rows_are_labeled_by_one_convolution():
  """The received weights are the same for all clients, who are its batch."""
  federation, _ = toy.federation('server')
  task = dataclasses.replace(_task(), model=networks.reordered())
  def label(model, shard, key):
    client = _client(federation, 0)._replace(shard=shard)
    return labeling.probabilities(task, model, client, key)[0]
  text = jax.jit(jax.vmap(label, (None, 0, None))).lower(
      task.model.init(KEY), federation.clients, KEY).as_text()
  found = [line for line in text.splitlines() if 'stablehlo.convolution' in
           line]
  kernel = 'x'.join(map(str, (3, 3, *networks.CHANNELS)))
  assert found
  for line in found:
    assert f'tensor<{kernel}xf32>' in line, line
    assert {*re.findall(r'group_count = (\d+)', line)} == {'1'}, line


def test_more_clients_than_there_are_is_refused():
  made = methods.make('semifl(stats_clients=7)', _task())
  with pytest.raises(ValueError, match='stats_clients=7'):
    made.init(KEY, toy.federation('server')[0])
