"""FedLabel: equations 3 to 8 by hand, and the laws that tie its variants."""
from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import tree
from fedjax_ssl.methods import fedlabel
from fedjax_ssl.methods.fedlabel import selection
from tests import toy
from tests.by_hand import softmax
from tests.methods.averaging_test import one_round
from tests.methods.baselines_test import weights
from tests.methods.updates import change, KNOWN, same, UNKNOWN, update

KEY = toy.key(6)
UNIFORM = jnp.zeros((2, 4))


def predictions(seed, rows=12, classes=4):
  """Logits of the global, the local and the trained model, and a mask."""
  rng = np.random.default_rng(seed)
  logits = 2 * rng.standard_normal((4, rows, classes)).astype(np.float32)
  # Half of the rows agree, else the consistency term is rarely seen.
  logits[1, ::2] = 0.7 * logits[0, ::2] + 0.1 * logits[1, ::2]
  mask = (np.arange(rows) < rows - 2).astype(np.float32)
  return (*map(jnp.asarray, logits), jnp.asarray(mask))


def score(p, kind):
  """Confidence of one distribution, as in print."""
  if kind == 'variance':
    return np.var(p)
  return np.log(p.size) + np.sum(p * np.log(p))


@pytest.mark.parametrize('kind', fedlabel.CONFIDENCES)
@pytest.mark.parametrize('divergence', fedlabel.DIVERGENCES)
def test_equations_3_to_8_by_hand(kind, divergence):
  """Row by row in NumPy: who is surer, who labels, what it costs."""
  beta, lambda_0 = 0.45, 0.7
  seen = set()
  for seed in range(4):
    ours, theirs, strong, clean, mask = predictions(seed)
    choice = fedlabel.select(ours, theirs, threshold=beta, confidence=kind)
    value, metrics = fedlabel.loss(choice, strong, clean, mask,
                                   consistency=lambda_0, divergence=divergence)
    total = 0.0
    for i in range(int(mask.sum())):
      p = [softmax(ours[i]), softmax(theirs[i])]
      h = [score(x, kind) for x in p]
      best = int(h[1] > h[0])
      label = int(p[best].argmax())
      assert int(choice.labels[i]) == label
      assert int(choice.from_local[i]) == best
      np.testing.assert_allclose(choice.ratio[i], h[1 - best] / h[best],
                                 rtol=1e-4)
      if p[best].max() <= beta:
        assert choice.accepted[i] == 0
        seen.add('dropped')
        continue
      total -= np.log(softmax(strong[i])[label])
      if p[1 - best].argmax() == label:
        q, r = softmax(clean[i]), p[1 - best]
        q, r = (q, r) if divergence == 'student_first' else (r, q)
        total += lambda_0 * h[1 - best] / h[best] * np.sum(q * np.log(q / r))
        seen.add('agreed')
      seen.add(('global', 'local')[best])
    np.testing.assert_allclose(value, total / mask.sum(), atol=1e-6)
    np.testing.assert_allclose(
        metrics['mask_rate'].total / metrics['mask_rate'].rows,
        (choice.accepted * mask).sum() / mask.sum())
  assert seen == {'dropped', 'agreed', 'global', 'local'}


def test_bare_it_is_pseudo_labelling_by_the_surer_model():
  """beta = 0 and lambda_0 = 0: cross entropy on the surer model's labels."""
  ours, theirs, strong, clean, mask = predictions(9)
  choice = fedlabel.select(ours, theirs, threshold=0.0)
  value, _ = fedlabel.loss(choice, strong, clean, mask, consistency=0.0)
  p, q = softmax(ours), softmax(theirs)
  labels = np.where(q.var(-1) > p.var(-1), q.argmax(-1), p.argmax(-1))
  rows = optax.softmax_cross_entropy_with_integer_labels(strong, labels)
  np.testing.assert_allclose(value, (rows * mask).sum() / mask.sum(),
                             rtol=1e-6)


@pytest.mark.parametrize('kind', fedlabel.CONFIDENCES)
def test_the_weight_is_by_the_lower_confidence_over_the_higher(kind):
  """So it never exceeds lambda_0, whichever model labels."""
  for seed in range(8):
    scale = 10.0 ** (seed - 6)  # Down to almost uniform ones.
    pair = [scale * x for x in predictions(seed)[:2]]
    scores = [fedlabel.confidence_score(x, kind) for x in pair]
    for logits in (pair, pair[::-1]):
      ratio = fedlabel.select(*logits, confidence=kind).ratio
      np.testing.assert_allclose(ratio * jnp.maximum(*scores),
                                 jnp.minimum(*scores), rtol=1e-5)


def test_a_confidence_at_the_threshold_is_not_enough():
  for threshold, accepted in ((0.5, 0), (0.49, 1)):
    choice = fedlabel.select(UNIFORM[:, :2], UNIFORM[:, :2],
                             threshold=threshold)
    np.testing.assert_array_equal(choice.accepted, accepted)


def test_rates_are_shares_of_the_accepted_rows_by_hand():
  """In turn: agreed, agreed and local, disputed, agreed, masked, unsure."""
  ours = jnp.array([[4., 0], [0, .1], [4, 0], [0, 4], [0, .1], [.2, 0]])
  theirs = jnp.array([[2., 0], [0, 4], [0, .1], [0, 2], [0, 4], [0, .3]])
  mask = jnp.array([1., 1, 1, 1, 0, 1])
  choice = fedlabel.select(ours, theirs, threshold=0.6)
  (value, metrics), (bare, _) = (
      fedlabel.loss(choice, ours, theirs, mask, consistency=weight)
      for weight in (0.5, 0.0))
  for name, want in (('mask_rate', (4, 5)), ('local_rate', (1, 4)),
                     ('agreed_rate', (3, 4))):
    assert tuple(metrics[name]) == want, name
  soft = metrics['consistency_loss']
  np.testing.assert_allclose(soft.total / soft.rows, value - bare, rtol=1e-4)
  assert value > bare


@pytest.mark.parametrize('kind', fedlabel.CONFIDENCES)
def test_two_uniform_predictions_are_finite_and_weigh_lambda_0(kind):
  choice = fedlabel.select(UNIFORM, UNIFORM, threshold=0.0, confidence=kind)
  np.testing.assert_array_equal(choice.ratio, 1)
  def value(clean):
    return fedlabel.loss(choice, UNIFORM, clean, jnp.ones(2),
                         consistency=0.3)[0]
  cost, slope = jax.value_and_grad(value)(UNIFORM + jnp.arange(4.0))
  chex.assert_tree_all_finite((cost, slope))
  p = softmax(np.arange(4.0))
  np.testing.assert_allclose(
      cost, np.log(4) + 0.3 * (p * np.log(4 * p)).sum(), rtol=1e-5)


def test_surer_means_a_larger_score_for_both_kinds():
  sharper = jnp.outer(jnp.array([0.0, 0.5, 2.0, 9.0]), jnp.array([1., 0, -1]))
  for kind in fedlabel.CONFIDENCES:
    scores = fedlabel.confidence_score(sharper, kind)
    assert (jnp.diff(scores) > 0).all()
    np.testing.assert_allclose(scores[0], 0, atol=1e-7)


def test_a_discarded_row_costs_nothing_and_gives_no_gradient():
  ours, theirs, strong, clean, mask = predictions(3)
  choice = fedlabel.select(ours, theirs, threshold=0.6)
  out = choice.accepted == 0
  assert 0 < int((out * mask).sum()) < int(mask.sum())
  def value(strong, clean):
    return fedlabel.loss(choice, strong, clean, mask, consistency=0.5)[0]
  spoiled = [jnp.where(out[:, None], jnp.nan, x) for x in (strong, clean)]
  assert value(*spoiled) == value(strong, clean)
  for slope in jax.grad(value, argnums=(0, 1))(*spoiled):
    assert (slope[out] == 0).all() and bool(jnp.isfinite(slope).all())


def test_ties_are_the_global_models():
  ours = jnp.array([[2.0, 0]])
  choice = fedlabel.select(ours, ours[:, ::-1], threshold=0.0)
  assert choice.from_local[0] == 0 and choice.labels[0] == 0
  assert choice.agreed[0] == 0
  np.testing.assert_array_equal(choice.discarded, ours[:, ::-1])


@pytest.mark.parametrize('labeler, label', [('global', 0), ('local', 2)])
def test_one_model_alone_labels_whatever_its_confidence(labeler, label):
  ours, theirs = jnp.array([[2.0, 0, 0]]), jnp.array([[0, 0, 2.5]])
  for scale in (0.1, 10.0):
    choice = fedlabel.select(
        ours, scale * theirs, threshold=0.0, labeler=labeler)
    assert choice.labels[0] == label and choice.agreed[0] == 0


def test_only_global_without_local_steps_or_consistency_equals_both():
  text = ('fedlabel(profile="paper", labeled_steps=0, consistency=0.0, '
          'threshold=0.3{})')
  both, alone = (update(text.format(knob))
                 for knob in ('', ', labeler="global"'))
  chex.assert_trees_all_equal(both.message, alone.message)
  rates = toy.means(both.metrics)
  assert rates['mask_rate'] > 0 == rates['local_rate']


def test_the_codes_loss_is_a_mean_over_what_counts_and_teaches_by_w_l():
  """CE over accepted rows; KL(w_L || w_U) over those in agreement, by ratio."""
  for seed in range(3):
    ours, theirs, strong, clean, mask = predictions(seed)
    choice = fedlabel.select(ours, theirs, threshold=0.6, teacher='local')
    value, _ = fedlabel.loss(choice, strong, clean, mask, consistency=0.7,
                             divergence='discarded_first', over='accepted')
    hard, soft = [], []
    for i in range(int(mask.sum())):
      p, q = softmax(ours[i]), softmax(theirs[i])
      best, rest = (p, q) if p.var() >= q.var() else (q, p)
      if best.max() <= 0.6:
        continue
      hard.append(-np.log(softmax(strong[i])[best.argmax()]))
      if best.argmax() == rest.argmax():
        soft.append(rest.var() / best.var() * np.sum(
            q * np.log(q / softmax(clean[i]))))
    assert soft and len(soft) < len(hard) < mask.sum()
    np.testing.assert_allclose(value, np.mean(hard) + 0.7 * np.mean(soft),
                               rtol=1e-5)


def test_the_two_chains_add_up():
  """With the global model as labeler neither chain sees the other."""
  text = "fedlabel(profile='paper', labeler='global', threshold=0.0{})"
  whole = update(text.format(''))
  labeled = update(text.format(', unlabeled_steps=0'))
  unlabeled = update(text.format(', labeled_steps=0'))
  chex.assert_trees_all_close(
      whole.message, jax.tree.map(jnp.add, labeled.message,
                                  unlabeled.message), atol=1e-6)
  assert whole.weight == labeled.weight + unlabeled.weight
  for part in (labeled, unlabeled):
    assert tree.global_norm(part.message) > 0


def test_the_mean_is_half_the_sum():
  whole = update('fedlabel(profile="paper", threshold=0.0)')
  half = update("fedlabel(profile='paper', threshold=0.0, combine='mean')")
  chex.assert_trees_all_close(
      half.message, tree.scale(whole.message, 0.5), rtol=1e-6)
  assert half.weight == whole.weight


OFFICIAL = "fedlabel(profile='official', threshold=0.3, warmup={})"


def test_the_code_averages_both_models_apart_and_takes_the_middle():
  """w_L evenly, w_U by accepted rows: 1/2 mean + 1/2 weighted mean."""
  text = OFFICIAL.format(0)
  updates = [update(text, client) for client in (0, 1)]
  parts = [update.message for update in updates]
  rows = [float(update.counts.accepted) for update in updates]
  assert rows[0] != rows[1]
  method = methods.make(text, toy.task())
  server = method.init(KEY, toy.federation()[0]).server
  mean = jax.tree.map(lambda x, y: (x + y) / 2, *(
      (update.message, update.counts) for update in updates))
  assert method.aggregate is not None
  new, _ = method.aggregate(server, mean, None, None, KEY)
  w = server.model.params
  def want(w, l0, l1, u0, u1):  # The second part is sent times its rows.
    return w + (l0 + l1) / 4 + (u0 + u1) / sum(rows) / 2
  chex.assert_trees_all_close(
      new.model.params, jax.tree.map(
          want, w, *(part[i].params for i in (0, 1) for part in parts)),
      rtol=1e-5, atol=1e-7)


def test_clients_without_labels_do_not_hold_back_the_mean_w_l():
  """Beside any number of them the labeled step is the same half."""
  text = OFFICIAL.format(1)  # In the warm-up w_U rests at w.
  known, unknown = (update(text, client) for client in (KNOWN, UNKNOWN))
  assert tree.global_norm(unknown.message) == 0
  method = methods.make(text, toy.task())
  server = method.init(KEY, toy.federation()[0]).server
  assert method.aggregate is not None
  for others in range(4):
    mean = jax.tree.map(
        lambda x, y, n=others: (x + n * y) / (1 + n), *(
            (update.message, update.counts) for update in (known, unknown)))
    new, _ = method.aggregate(server, mean, None, None, KEY)
    chex.assert_trees_all_close(
        new.model.params, jax.tree.map(
            lambda w, l: w + l / 2, server.model.params,
            known.message[0].params), rtol=1e-5, atol=1e-7)


def test_without_any_labels_in_a_round_half_of_the_other_step_is_taken():
  """As where no row is accepted, and half of the labeled one is."""
  text = OFFICIAL.format(0)
  sent = update(text, UNKNOWN)
  assert sent.counts.labeled == 0 < tree.global_norm(sent.message[1])
  method = methods.make(text, toy.task())
  server = method.init(KEY, toy.federation()[0]).server
  assert method.aggregate is not None
  new, _ = method.aggregate(
      server, (sent.message, sent.counts), None, None, KEY)
  chex.assert_trees_all_close(
      new.model.params, jax.tree.map(
          lambda w, u: w + u / sent.counts.accepted / 2, server.model.params,
          sent.message[1].params), rtol=1e-5, atol=1e-7)


def test_the_default_is_the_code_and_its_warmup_a_share_of_the_run():
  """50 rounds of 2000 there; of 60 rounds, as of 80, these are 2."""
  def sent(knobs, round_, horizon):
    return update(f'fedlabel{knobs}', round_=round_,
                     schedule_rounds=horizon).message
  for round_ in (1, 2):  # The last of the warm-up and the next.
    chex.assert_trees_all_equal(
        sent('', round_, 60),
        sent("(profile='official', threshold=0.3, consistency=0.05, "
             "combine='apart', divergence='discarded_first', warmup=2)",
             round_, 80))
  for horizon, last in ((60, 1), (2000, 49)):
    assert tree.global_norm(sent('', last, horizon)[1]) == 0
    assert tree.global_norm(sent('', last + 1, horizon)[1]) > 0


def test_in_the_warmup_w_u_rests():
  """Then the code takes half of the labeled step."""
  early = update(OFFICIAL.format(1))
  assert tree.global_norm(early.message[1]) == 0
  assert early.counts.accepted == 1 / 16  # One row; the widest client has 12.
  assert tree.global_norm(early.message[0]) > 0
  assert early.metrics['mask_rate'].rows == 0
  assert tree.global_norm(update(OFFICIAL.format(0)).message[1]) > 0


def test_each_view_is_a_batch_of_its_own():
  """The statistics move for the strong view, then for the rows themselves.

  Rows that are not accepted, here half of them, do not count in them.
  """
  task = toy.task('conv')
  federation, _ = toy.federation()
  shard = jax.tree.map(lambda x: np.asarray(x)[UNKNOWN], federation.clients)
  own = shard.unlabeled[:int(shard.num_unlabeled)]
  rows = jnp.asarray(federation.train.inputs)[own]
  model = methods.make('fedavg', task).init(KEY, federation).server.model
  sure = np.asarray(jax.nn.softmax(task.apply(model, rows)).max(-1))
  bar = float(np.sort(sure)[len(own) // 2 - 1:][:2].mean())
  mask = jnp.asarray(sure > bar, jnp.float32)
  assert mask.sum() == len(own) // 2
  after = model
  for view in (255 - rows, rows):
    _, stats = task.apply_train(after, view, mask)
    after = after._replace(stats=stats)
  sent = update(f'fedlabel(profile="paper", threshold={bar})', UNKNOWN,
                model='conv', strong=lambda key, x: 255 - x, weak=same,
                local_steps=1, unlabeled_batch=16)
  assert tree.global_norm(sent.message.stats) > 1e-2
  chex.assert_trees_all_close(sent.message.stats, tree.subtract(
      after.stats, model.stats), rtol=1e-4, atol=1e-6)


def test_counts_of_rows_do_not_drown_the_change_in_the_norm():
  updates = [update(OFFICIAL.format(0), i) for i in range(toy.NUM_CLIENTS)]
  assert all(0 < update.counts.accepted <= 1 for update in updates)
  limit = 1.001 * max(float(tree.global_norm(update.message))
                      for update in updates)
  server = [one_round(OFFICIAL.format(0), **more)[1] for more in (
      {}, {'max_update_norm': limit})]
  np.testing.assert_array_equal(*map(weights, server))


def test_the_pull_is_a_mean_of_each_array():
  a = {'x': jnp.arange(6.0).reshape(2, 3), 'y': jnp.array([3.0])}
  gap = selection.mean_square_gaps(a, jax.tree.map(jnp.zeros_like, a))
  np.testing.assert_allclose(gap, 55 / 6 + 9)


def test_the_weight_counts_rows_that_were_used():
  """r_k: labeled visits and accepted rows; discarded ones do not count."""
  n_s, n_u = toy.LABELED[0], toy.UNLABELED[0]
  labeled_visits = n_s  # One epoch.
  none = update('fedlabel(profile="paper", threshold=1.0)')
  assert none.weight == labeled_visits
  every = update('fedlabel(profile="paper", threshold=0.0)')
  assert every.weight == labeled_visits + n_u
  some = update('fedlabel(profile="paper", threshold=0.45)')
  accepted = float(some.metrics['mask_rate'].total)
  assert 0 < accepted < n_u
  assert some.weight == labeled_visits + accepted


def test_the_weight_may_count_rows_that_are_held():
  sent = update('fedlabel(profile="paper", weighting="examples", '
                'unlabeled_steps=0)')
  assert sent.weight == toy.LABELED[0] + toy.UNLABELED[0]


def decaying(round_):
  """An optimizer that moves a model also where its loss does not."""
  del round_
  return optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.2))


def test_a_client_whose_rows_are_all_discarded_sends_its_labeled_step():
  none, labeled = (update(f'fedlabel(profile="paper", {knob})',
                          optimizer=decaying)
                   for knob in ('threshold=1.0', 'unlabeled_steps=0'))
  chex.assert_trees_all_close(none.message, labeled.message,
                              rtol=1e-5, atol=1e-7)


KEEPING = 'fedlabel(threshold=1.0, warmup=0, keep_local=True)'


def test_a_step_without_accepted_rows_has_no_pull():
  """Nothing else could make it cost anything."""
  found = update(KEEPING, optimizer=decaying).metrics['unlabeled_loss']
  assert found.total == 0 < found.rows


def test_the_local_model_that_is_kept_is_w_l():
  found = update(KEEPING, optimizer=decaying)
  model = methods.make('fedlabel', toy.task()).init(
      KEY, toy.federation()[0]).server.model
  assert tree.global_norm(found.message[0]) > 0
  chex.assert_trees_all_close(
      found.memory, tree.add(model, found.message[0]), atol=1e-6)


def test_without_its_unlabeled_chain_it_is_fedavg():
  a, b = (change(text, weak=same, labeled_batch=8) for text in (
      'fedlabel(profile="paper", unlabeled_steps=0)', 'fedavg'))
  np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_fedprox_pulls_on_the_labeled_chain_only():
  def sent(steps, mu):
    text = (f"fedlabel(profile='paper', server='fedprox', mu={mu}, {steps}=0, "
            'threshold=0.0)')
    return update(text, local_epochs=3).message
  chex.assert_trees_all_equal(sent('labeled_steps', 0.0),
                              sent('labeled_steps', 5.0))
  free, pulled = (tree.global_norm(sent('unlabeled_steps', mu))
                  for mu in (0.0, 5.0))
  assert pulled < 0.7 * free


def test_passes_are_counted():
  """Two labelers forward; strong and clean views forward and backward."""
  n_s, n_u = toy.LABELED[0], toy.UNLABELED[0]
  for text, forward, backward in (
      ('fedlabel(profile="paper", threshold=0.0)', n_s + 4 * n_u,
       n_s + 2 * n_u),
      ('fedlabel(profile="paper", consistency=0.0)', n_s + 3 * n_u, n_s + n_u),
      ("fedlabel(profile='paper', labeler='local')", n_s + 2 * n_u, n_s + n_u)):
    metrics = update(text).metrics
    assert float(metrics['forward_passes']) == forward, text
    assert float(metrics['backward_passes']) == backward, text


def test_labels_at_the_server_are_refused():
  with pytest.raises(ValueError, match='labels_at'):
    methods.make('fedlabel', toy.task(labels_at='server'))
