from __future__ import annotations

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from fedjax_ssl.core import registry
from fedjax_ssl.data import partition
from fedjax_ssl.data.partition import dirichlet
from tests.by_hand import rows_by_class

C = 10
LABELS = np.repeat(np.arange(C), 100)[np.random.default_rng(7).permutation(
    1000)]
NAMES = sorted(partition.PARTITIONS)
RANDOM = [name for name in NAMES if name != 'round_robin']
# Those that deal every row of the pool.
COMPLETE = ('dirichlet_capped', 'dirichlet_pairs', 'dirichlet_shares',
            'iid_random', 'round_robin', 'shards')


def _rng(seed=0):
  return np.random.default_rng(seed)


@pytest.mark.parametrize('name', NAMES)
def test_owners_are_clients_inside_the_pool(name):
  where = _rng().random(1000) < .6
  owner = partition.PARTITIONS[name](_rng(), LABELS, 5, where=where)
  assert owner.dtype == np.int32 and owner.shape == LABELS.shape
  assert (owner[~where] == -1).all()
  assert set(np.unique(owner[where])) <= set(range(-1, 5))
  assert set(range(5)) <= set(owner)
  if name in COMPLETE:
    assert (owner[where] >= 0).all()


@pytest.mark.parametrize('name', RANDOM)
@pytest.mark.parametrize('rng', [7, None, np.random.RandomState(0)])
def test_what_cannot_draw_on_the_host_is_refused(name, rng):
  with pytest.raises(ValueError, match='rng must be a host generator'):
    partition.PARTITIONS[name](rng, LABELS, 5)


@pytest.mark.parametrize('name', NAMES)
def test_deterministic_in_the_seed(name):
  deal = partition.PARTITIONS[name]
  first = deal(_rng(1), LABELS, 5)
  np.testing.assert_array_equal(first, deal(_rng(1), LABELS, 5))
  if name in RANDOM:
    assert (first != deal(_rng(2), LABELS, 5)).any()


@pytest.mark.parametrize('name', NAMES)
def test_one_client_gets_everything(name):
  # But for imbalanced draws, which leave what the row does not ask for.
  knobs = {'per_client': 10} if name == 'shards' else {}
  owner = partition.PARTITIONS[name](_rng(), LABELS, 1, **knobs)
  assert (owner <= 0).all()
  assert (owner == 0).all() or name == 'bimb'


@pytest.mark.parametrize('name', NAMES)
def test_arguments_are_checked(name):
  deal = partition.PARTITIONS[name]
  with pytest.raises(ValueError, match='num_clients'):
    deal(_rng(), LABELS, 0)
  with pytest.raises(ValueError, match='labels'):
    deal(_rng(), LABELS / 2, 2)
  with pytest.raises(ValueError, match='labels'):
    deal(_rng(), LABELS - 1, 2)
  with pytest.raises(ValueError, match='where'):
    deal(_rng(), LABELS, 2, where=np.ones(3, bool))


def test_names_with_knobs_reach_the_functions():
  got = registry.build('partition', 'dirichlet_capped(alpha=0.3)',
                       partition.PARTITIONS, _rng(), LABELS, 5, where=None)
  want = partition.dirichlet_capped(_rng(), LABELS, 5, alpha=.3)
  np.testing.assert_array_equal(got, want)


# Any labels, gaps and rare classes included.
vectors = st.lists(st.integers(0, 6), min_size=1, max_size=60).map(np.array)


@hypothesis.settings(max_examples=60)
@hypothesis.given(vectors, st.integers(1, 8), st.integers(0, 99),
                  st.sampled_from(RANDOM))
def test_any_labels(labels, num_clients, seed, name):
  kwargs = {'min_size': 0} if name == 'dirichlet_capped' else {}
  try:
    owner = partition.PARTITIONS[name](
        _rng(seed), labels, num_clients, **kwargs)
  except ValueError as error:
    assert name in ('iid_count', 'shards', 'dirichlet_clients')
    assert 'num_clients' in str(error) or 'per_client' in str(error)
    return
  sizes = np.bincount(owner[owner >= 0], minlength=num_clients)
  assert sizes.size == num_clients and sizes.sum() <= labels.size
  if name in COMPLETE:
    assert sizes.sum() == labels.size
  if name == 'iid_random':
    assert np.ptp(sizes) <= 1
  if name == 'dirichlet_clients':
    assert (sizes == labels.size // num_clients).all()
  if name == 'iid_count':
    want = np.bincount(labels) // num_clients
    assert (rows_by_class(owner, labels, num_clients) == want).all()


def test_iid_count_gives_equal_class_counts_and_reports_the_rest():
  labels = np.repeat([0, 1], [103, 57])
  owner = partition.iid_count(_rng(), labels, 10)
  assert (rows_by_class(owner, labels, 10) == [10, 5]).all()
  assert (owner == -1).sum() == 3 + 7
  owner = partition.iid_count(_rng(), labels, 10, per_class=4)
  assert (rows_by_class(owner, labels, 10) == 4).all()
  with pytest.raises(ValueError, match='per_class=6 for 10 clients needs 60'):
    partition.iid_count(_rng(), labels, 10, per_class=6)
  with pytest.raises(ValueError, match='num_clients=104'):
    partition.iid_count(_rng(), labels, 104)


def _skew(owner, num_clients=10):
  """Mean total variation between a client's class mix and the pool's."""
  counts = rows_by_class(owner, LABELS, num_clients)
  counts = counts[counts.sum(1) > 0]
  mixes = counts / counts.sum(1, keepdims=True)
  return np.abs(mixes - 1 / C).sum(1).mean() / 2


@pytest.mark.parametrize('deal,knobs', [
    (partition.dirichlet_capped, {'min_size': 0}),
    (partition.dirichlet_shares, {}),
    (partition.dirichlet_clients, {})])
def test_alpha_runs_from_one_class_to_iid(deal, knobs):
  # Client by client a tiny alpha empties classes, and the last take what is
  # left; its alpha is the total over ten classes besides.
  alphas = (1., 10., 100., 1e4) if deal is partition.dirichlet_clients else (
      1e-3, .1, 1.0, 1e4)
  skews = [_skew(deal(_rng(), LABELS, 10, alpha=alpha, **knobs))
           for alpha in alphas]
  assert skews == sorted(skews, reverse=True)
  assert skews[0] > .65 and skews[-1] < .06 + .1 * (
      deal is partition.dirichlet_clients)


def test_client_mixes_have_the_variance_of_the_dirichlet_law():
  """Var(q_c) = p (1 - p) / (alpha + 1), while no class has run out."""
  labels = np.repeat(np.arange(4), 10_000)
  owner = partition.dirichlet_clients(_rng(), labels, 400, alpha=1.0)
  counts = np.stack([np.bincount(labels[owner == k], minlength=4)
                     for k in range(200)])
  variance = (counts / counts.sum(1, keepdims=True)).var(0).mean()
  np.testing.assert_allclose(variance, .25 * .75 / 2, rtol=.15)


def test_shares_cut_classes_as_the_mixes_ask():
  """Each class is cut by q_kc / sum_j q_jc, q_k drawn client by client."""
  labels = np.repeat(np.arange(3), [5000, 3000, 9000])
  owner = partition.dirichlet_shares(_rng(5), labels, 4, alpha=0.7)
  rng = _rng(5)
  mixes = np.stack([rng.dirichlet(np.full(3, .7)) for _ in range(4)])
  want = mixes / mixes.sum(0) * [5000, 3000, 9000]
  np.testing.assert_allclose(rows_by_class(owner, labels, 4), want, atol=1.01)


def test_capped_shares_of_a_class_are_the_draw():
  """Nobody is full before the first class."""
  want = _rng(3).dirichlet(np.full(4, .5))
  owner = partition.dirichlet_capped(
      _rng(3), np.zeros(1000, int), 4, alpha=.5, min_size=0)
  np.testing.assert_allclose(
      np.bincount(owner, minlength=4) / 1000, want, atol=.002)


@pytest.mark.parametrize('name', [
    'dirichlet_capped', 'dirichlet_clients', 'dirichlet_shares'])
def test_rows_of_a_class_are_shuffled_before_they_are_cut(name):
  owner = partition.PARTITIONS[name](_rng(), np.zeros(200, int), 4)
  assert (np.diff(owner) < 0).any()


def test_alpha_of_clients_is_in_total_and_of_shares_for_each_class():
  """At .1 and ten classes one class a client, or about two."""
  def classes(deal, alpha):
    counts = rows_by_class(deal(_rng(), LABELS, 50, alpha=alpha), LABELS, 50)
    mixes = counts[counts.sum(1) > 4]
    mixes = mixes / mixes.sum(1, keepdims=True)
    return np.median(1 / np.square(mixes).sum(1))
  assert classes(partition.dirichlet_clients, .1) < 1.1
  assert classes(partition.dirichlet_shares, .1) > 1.4
  assert classes(partition.dirichlet_clients, 1.0) > 1.4


@pytest.mark.parametrize('deal,knobs', [
    (partition.dirichlet_capped, {'min_size': 0}),
    (partition.dirichlet_shares, {}),
    (partition.dirichlet_clients, {})])
@pytest.mark.parametrize('alpha', [1e-320, 1e-300, 1e-9, 1e300, 1.7e308])
def test_extreme_alphas_deal_every_row(deal, knobs, alpha):
  owner = deal(_rng(), LABELS, 10, alpha=alpha, **knobs)
  assert (owner >= 0).all()
  if alpha > 1:
    assert _skew(owner) < .16


@pytest.mark.parametrize('deal', [
    partition.dirichlet_capped, partition.dirichlet_clients,
    partition.dirichlet_pairs, partition.dirichlet_shares])
@pytest.mark.parametrize('alpha', [
    0.0, -1.0, float('nan'), float('inf'), '0.5', None, True])
def test_bad_alphas(deal, alpha):
  with pytest.raises(ValueError, match='alpha must be finite and > 0'):
    deal(_rng(), LABELS, 5, alpha=alpha)


@pytest.mark.parametrize('num_clients', [1, 2, 5, 8])
def test_pairs_have_all_classes_and_each_of_two_its_own(num_clients):
  owner = partition.dirichlet_pairs(_rng(), LABELS, num_clients, alpha=.05)
  counts = rows_by_class(owner, LABELS, num_clients)
  assert np.ptp(counts.sum(1)) <= 1
  # A pair is a random chunk of the pool: no class is far from its share.
  pairs = np.add.reduceat(counts, range(0, num_clients, 2))
  share = pairs / pairs.sum(1, keepdims=True)
  assert np.abs(share - 1 / C).max() < .08
  if num_clients > 2:  # Within, classes go to one of the two.
    whole = partition.dirichlet_capped(
        _rng(), LABELS, num_clients, alpha=.05, min_size=10)
    assert .15 < _skew(owner) < _skew(whole)


def test_capped_dirichlet_keeps_its_promises():
  owner = partition.dirichlet_capped(
      _rng(), LABELS, 10, alpha=.5, min_size=40)
  assert np.bincount(owner).min() >= 40
  # A client stops once it has the mean: it can pass it by one class at most.
  owner = partition.dirichlet_capped(
      _rng(), LABELS, 10, alpha=.01, min_size=0)
  assert np.bincount(owner, minlength=10).max() < 100 + 100


@pytest.mark.parametrize('size,num_clients,alpha,min_size', [
    (100, 20, .5, 10), (1000, 100, .1, 10), (50_000, 5_000, .01, 8)])
def test_hopeless_draws_end_in_a_clear_error(
    size, num_clients, alpha, min_size):
  labels = np.arange(size) % C
  with pytest.raises(ValueError) as caught:
    partition.dirichlet_capped(_rng(), labels, num_clients, alpha=alpha,
                               min_size=min_size)
  for part in (f'alpha={alpha:g}', f'{num_clients} clients {min_size} of '
               f'{size} examples'):
    assert part in str(caught.value)


@pytest.mark.parametrize('labels,clients,want', [
    (5000, 100, 10), (500, 100, 1), (100, 20, 1), (100, 100, 0), (100, 10, 2)])
def test_labeled_min_size(labels, clients, want):
  assert partition.labeled_min_size(labels, clients) == want


def test_shards_of_semifl():
  owner = partition.shards(_rng(), LABELS, 20, per_client=2)
  counts = rows_by_class(owner, LABELS, 20)
  # 4 shards of 25 a class; a client has two of one class or of two.
  assert (counts.sum(1) == 50).all() and set(counts.ravel()) <= {0, 25, 50}
  assert ((counts > 0).sum(1) <= 2).all()
  with pytest.raises(ValueError, match='per_client=2 shards of 7 clients'):
    partition.shards(_rng(), LABELS, 7)
  with pytest.raises(ValueError, match='class 0 has 100 examples'):
    partition.shards(_rng(), LABELS, 1010, per_client=1)


def test_bimb_rows_are_rolled_and_sum_to_one():
  rows = partition.bimb_rows(10)
  np.testing.assert_allclose(
      rows[0], [.50, .15, .03, .03, .03, .02, .03, .03, .03, .15])
  for num_classes in (1, 2, 3, 4, 7, 10, 62):
    rows = partition.bimb_rows(num_classes)
    np.testing.assert_allclose(rows.sum(1), 1)
    for t in range(num_classes):
      np.testing.assert_array_equal(rows[t], np.roll(rows[0], t))
      assert rows[t].argmax() == t


def test_bimb_mixes_follow_the_rows():
  labels = np.arange(100_000) % C
  owner = partition.bimb(_rng(), labels, 20)
  counts = rows_by_class(owner, labels, 20)
  want = partition.bimb_rows(C)[np.arange(20) % C] * 5000
  assert np.abs(counts - want).max() < 6 * np.sqrt(want.max() / 2)
  # Nothing is dealt twice, and what is missing was exhausted or not drawn.
  assert counts.sum(0).max() <= 10_000
  assert 0 <= (owner == -1).sum() < 2_000


def test_round_robin_of_fedssl():
  def classes(num_clients):
    owner = partition.round_robin(_rng(), LABELS, num_clients)
    return [set(LABELS[owner == k]) for k in range(num_clients)]
  assert classes(3) == [{0, 3, 6, 9}, {1, 4, 7}, {2, 5, 8}]
  assert classes(9) == [{0, 9}] + [{k} for k in range(1, 9)]
  with pytest.raises(ValueError, match='num_clients=11'):
    classes(11)


def test_round_robin_of_unsigned_labels():
  labels, where = LABELS.astype(np.uint8), LABELS > 0
  np.testing.assert_array_equal(
      partition.round_robin(_rng(), labels, 3, where=where),
      partition.round_robin(_rng(), LABELS, 3, where=where))


@pytest.mark.parametrize('alpha', [1.0, 0.01, 1e-310])
def test_mixes_at_once_are_those_one_after_another(alpha):
  """Also where shares underflow, for which more numbers are drawn."""
  concentration = np.full(4, alpha)
  rngs = np.random.default_rng(3), np.random.default_rng(3)
  mixes = dirichlet._mixes(rngs[0], concentration, 50)
  np.testing.assert_array_equal(mixes, [
      dirichlet._dirichlet(rngs[1], concentration) for _ in range(50)])
  assert rngs[0].integers(1 << 60) == rngs[1].integers(1 << 60)
