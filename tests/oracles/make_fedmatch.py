"""Asks FedMatch's authors' code what it computes.

wyjeong/FedMatch at 4947aa255d59bd37915e25a719763aaaf5d7e067, with labels at the
clients: four rounds of four clients by its `Server` and `Client` of
models/fedmatch and its `TrainModule`, with helpers in the second and fourth,
sparse messages and their costs, and the terms of every step's two losses; the
vote of own model and helpers alone; and how a learning rate falls. Two of its
dense layers are the network, data and noise image are given, and its numbers
are chosen so that every part counts.

Numbers of psi up to l1_thres count as 0 where the code decides what to send,
but it sends them as they are. So the rounds are run 'released' with l1_thres at
0, and 'cut', where the small numbers are set to 0 before the code sends. Keras
2 is needed, tf_keras. In the repository's root, with TensorFlow 2.21:

python -m tests.oracles.make_fedmatch --checkout=DIR \
    --out=tests/oracles/fedmatch.npz
"""
from __future__ import annotations

import os
import pathlib
import tempfile
import types
from typing import Any

import numpy as np

from tests.oracles import authors, torchssl

COMMIT = '4947aa255d59bd37915e25a719763aaaf5d7e067'
WIDTH, HIDDEN, CLASSES = torchssl.WIDTH, torchssl.HIDDEN, torchssl.CLASSES
CLIENTS, LABELED, UNLABELED, BATCH, ROUNDS = 4, 8, 16, 4, 4
KNOBS = {'num_helpers': 2, 'confidence': 0.5, 'psi_factor': 0.2,
         'h_interval': 2, 'lambda_s': 10.0, 'lambda_i': 0.5, 'lambda_a': 0.7,
         'lambda_l2': 0.3, 'lambda_l1': 0.02, 'delta_thres': 0.01,
         'lr': 0.03}
THRESHOLDS = {'released': 0.0, 'cut': 0.02}
# What weighs the terms of the loss on unlabeled rows.
TERMS = ('lambda_i', 'lambda_a', 'lambda_l1', 'lambda_l2')


class _Numpy(types.ModuleType):
  """NumPy, which then joined lists of arrays of different shapes."""

  def __getattr__(self, name: str) -> Any:
    return getattr(np, name)

  @staticmethod
  def concatenate(lists: Any, axis: int = 0) -> list[Any]:
    del axis
    return [item for part in lists for item in part]


class Logger:
  """Writes nothing."""

  def __init__(self, args: Any) -> None:
    del args

  def print(self, *args: Any) -> None:
    pass

  save_current_state = print


class Loader:
  """Has the rows of every client; an image is its clean and strong view."""

  data: dict[str, np.ndarray] = {}

  def __init__(self, args: Any) -> None:
    del args

  def scale(self, x: np.ndarray) -> np.ndarray:
    return (x[:, 0] if x.ndim == 3 else x).astype(np.float32)

  def augment(self, x: np.ndarray, soft: bool) -> np.ndarray:
    assert not soft
    return x[:, 1]

  def _rows(self, client: int, where: slice) -> Any:
    size = LABELED + UNLABELED
    x, y = (self.data[k][client * size:(client + 1) * size][where]
            for k in ('inputs', 'labels'))
    return x, np.eye(CLASSES, dtype=np.float32)[y], 'rows'

  def get_s_by_id(self, client: int) -> Any:
    return self._rows(client, slice(LABELED))

  def get_u_by_id(self, client: int, task: int) -> Any:
    del task
    return self._rows(client, slice(LABELED, None))

  def get_valid(self) -> Any:
    x, y, _ = self._rows(0, slice(LABELED))
    return x[:, 0], y

  get_test = get_valid


def import_theirs(checkout: pathlib.Path) -> tuple[Any, Any]:
  """TensorFlow with Keras 2, and their modules."""
  os.environ['TF_USE_LEGACY_KERAS'] = '1'
  import tensorflow as tf
  tf.config.set_soft_device_placement(True)  # They name a GPU.
  tf.keras.optimizers.SGD = tf.keras.optimizers.legacy.SGD
  authors.pretend('torch', 'cv2', 'PIL', 'data', 'data.loader', 'misc.logger')
  theirs = types.SimpleNamespace(**{
      name.rpartition('.')[2]: authors.load(checkout, name)
      for name in ('modules.federated', 'modules.nets', 'modules.train',
                   'models.fedmatch.client', 'models.fedmatch.server')})

  class Net(theirs.nets.NetModule):  # type: ignore[name-defined, misc]
    """Two of their dense layers."""

    def build_resnet9(self, decomposed: bool) -> Any:
      shapes = ((WIDTH, HIDDEN), (HIDDEN, CLASSES))
      if not decomposed:
        return tf.keras.Sequential([
            tf.keras.layers.Dense(shape[1], use_bias=False, activation=name,
                                  input_shape=shape[:1])
            for shape, name in zip(shapes, ('tanh', 'softmax'), strict=True)])
      self.sigma, self.psi = ([
          self.create_variable(f'{name}_{i}', shape)
          for i, shape in enumerate(shapes)] for name in ('sigma', 'psi'))
      first = self.dense_decomposed(0, HIDDEN, tf.tanh)
      last = self.dense_decomposed(1, CLASSES, 'softmax')
      return lambda x: last(first(tf.convert_to_tensor(x)))

  theirs.federated.NetModule = Net
  theirs.federated.DataLoader, theirs.federated.Logger = Loader, Logger
  theirs.client.np = _Numpy('numpy')
  theirs.train.np_save = theirs.nets.np_save
  return tf, theirs


def arguments(folder: str = '', threshold: float = 0.0,
              scenario: str = 'labels-at-client') -> types.SimpleNamespace:
  """What their config.py holds."""
  at_server = scenario == 'labels-at-server'
  return types.SimpleNamespace(
      **KNOBS, l1_thres=threshold, scenario=scenario,
      model='fedmatch', task='biid', gpu='0', num_clients=CLIENTS,
      frac_clients=1.0, num_rounds=100, num_tasks=1, num_epochs_client=1,
      num_epochs_server=1, num_epochs_server_pretrain=1,
      batch_size_client=BATCH * (1 + at_server), batch_size_server=BATCH,
      batch_size_test=BATCH, lr_patience=10**6, lr_factor=3, lr_min=1e-20,
      num_classes=CLASSES, seed=0, wd=0.0, check_pts=folder,
      fed_method='fedavg')


def draw() -> dict[str, np.ndarray]:
  """Rows of all clients, first weights, and the noise that models answer."""
  rng = np.random.default_rng(8)
  labels = rng.integers(0, CLASSES, CLIENTS * (LABELED + UNLABELED))
  centers = rng.normal(size=(CLASSES, WIDTH)) * 1.2
  inputs = centers[labels][:, None] + rng.normal(
      size=(labels.size, 2, WIDTH)) * [[0.4], [0.8]]
  weights = authors.draw_weights(rng, WIDTH, HIDDEN, CLASSES, 0.5)
  return {'inputs': inputs.astype(np.float32), 'labels': labels,
          'noise': rng.normal(size=(1, WIDTH)).astype(np.float32),
          **{name: weights[name].astype(np.float32) for name in ('w0', 'w1')}}


def start(theirs: Any, given: dict[str, np.ndarray],
          args: types.SimpleNamespace) -> Any:
  """Their server with the given weights, as its `run` makes it."""
  server = theirs.server.Server(args)
  server.build_network()
  for part, factor in ((server.sig, 1.0), (server.psi, args.psi_factor)):
    for i, variable in enumerate(part):
      variable.assign(given[f'w{i}'] * factor)
  server.rgauss = given['noise']
  server.load_data()
  server.train.init_state('server')
  server.train.set_details({
      'model': server.global_model, 'loss_fn': server.loss_fn,
      'trainables': server.trainables, 'num_epochs': args.num_epochs_server,
      'batch_size': args.batch_size_server})
  return server


def rounds(theirs: Any, given: dict[str, np.ndarray], run: str,
           scenario: str = 'labels-at-client') -> dict[str, Any]:
  """Both parts at the server after every round, costs, confident rows.

  Of 'released' the terms of the losses too, in every step of every client.
  """
  results: dict[str, list[Any]] = {name: [] for name in (
      'sigma0', 'sigma1', 'psi0', 'psi1', 'up', 'down', 'confident', 'helpers')}
  with tempfile.TemporaryDirectory() as folder:
    args = arguments(folder, THRESHOLDS[run], scenario)
    server = start(theirs, given, args)
    client = theirs.client.Client(0, args)
    server.clients = {0: client}
    if run == 'cut':
      cut_first(client)
    else:
      measure(server, client, results)
    for round_ in range(ROUNDS):
      server.curr_round, server.connected_ids = round_, list(range(CLIENTS))
      watch(server, client, results)
      if scenario == 'labels-at-server':
        theirs.train.tf.keras.backend.set_learning_phase(run == 'cut')
        server.train_global_model()
      server._train_clients()
      for i in range(2):
        results[f'sigma{i}'].append(server.sig[i].numpy())
        results[f'psi{i}'].append(server.psi[i].numpy())
      results['up'].append(server.c2s_sum[-1])
      results['down'].append(server.s2c_sum[-1])
  stacked = {name: np.array(value) for name, value in results.items()}
  for name in stacked.keys() & {'supervised', 'terms'}:  # Steps one by one.
    whole = stacked[name].astype(np.float32)
    holders = (CLIENTS,) * (len(whole) > 2 * ROUNDS)  # Not of the server's.
    stacked[name] = whole.reshape(ROUNDS, *holders, 2, *whole.shape[1:])
  return {f'{run}_{name}': value for name, value in stacked.items()}


def measure(server: Any, client: Any, results: dict[str, list[Any]]) -> None:
  """Notes every step's loss on labels, and the terms of that on other rows."""
  supervised: list[float] = []
  terms: list[list[float]] = []
  results |= {'supervised': supervised, 'terms': terms}
  args, unsupervised = client.args, client.loss_fn_u

  def on_labels(plain: Any) -> Any:
    def loss_fn(x: Any, y: Any) -> Any:
      predicted, loss = plain(x, y)
      supervised.append(float(loss))
      return predicted, loss
    return loss_fn

  def loss_fn_u(x: Any) -> Any:
    terms.append([])
    for name in TERMS:  # It alone has a weight.
      client.args = types.SimpleNamespace(**{
          **vars(args), **{other: 0.0 for other in TERMS if other != name}})
      terms[-1].append(float(unsupervised(x)[1]))
    client.args = args
    return unsupervised(x)

  server.train.params['loss_fn'] = on_labels(server.loss_fn)
  client.loss_fn_s, client.loss_fn_u = on_labels(client.loss_fn_s), loss_fn_u


def cut_first(client: Any) -> None:
  """Sets small numbers of psi to 0 before they are sent."""
  sends = client.train.cal_c2s

  def cal_c2s() -> None:
    for psi in client.psi:
      psi.assign(client.train.sparsify(psi))
    sends()

  client.train.cal_c2s = cal_c2s


def watch(server: Any, client: Any, results: dict[str, list[Any]]) -> None:
  """Notes a round's confident rows and whose psi the helpers are."""
  confident: list[int] = []
  chosen: list[list[int]] = []
  results['confident'].append(confident)
  results['helpers'].append(chosen)
  plain = type(server)

  def similar(cid: int) -> Any:
    found = plain.get_similar_models(server, cid)
    ids = [-1, -1]
    for place, psi in enumerate(found or []):
      ids[place] = next(k for k, w in server.cid_to_weights.items()
                        if w[-len(psi)] is psi[0])
    chosen.append(ids)
    return found

  def train(*args: Any, **knobs: Any) -> Any:
    update = type(client).train_one_round(client, *args, **knobs)
    confident.append(client.train.num_confident)
    return update

  server.get_similar_models, client.train_one_round = similar, train


def votes(theirs: Any) -> dict[str, np.ndarray]:
  """Their labels for predictions of the own model and two helpers."""
  rng = np.random.default_rng(9)
  logits = rng.normal(size=(3, 24, CLASSES))
  p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  voter = theirs.client.Client.__new__(theirs.client.Client)
  voter.args, voter.is_helper_available = arguments(), True
  return {'vote_logits': logits, 'votes': voter.agreement_based_labeling(
      p[0], list(p[1:])).argmax(-1)}


def falls(theirs: Any) -> dict[str, np.ndarray]:
  """Their learning rate after each of some validation losses."""
  losses = np.array([3, 2, 2.5, 2, 2.1, 1.9, 2, 2, 2, 2, 2, 2, 1.8, 1.7])
  module = theirs.train.TrainModule.__new__(theirs.train.TrainModule)
  module.args = arguments()
  module.args.lr_patience = 3
  module.logger = types.SimpleNamespace(print=lambda *args: None)
  module.state = {'client_id': 0, 'curr_epoch': 0}
  module.init_learning_rate()
  rates = []
  for loss in losses:
    module.adaptive_lr_decay(loss)
    rates.append(module.state['curr_lr'])
  return {'val_losses': losses, 'rates': np.array(rates)}


def main() -> None:
  checkout, out = authors.arguments(__doc__, 'wyjeong/FedMatch', COMMIT)
  _, theirs = import_theirs(checkout)
  given = Loader.data = draw()
  results: dict[str, Any] = {}
  for run in THRESHOLDS:
    results |= rounds(theirs, given, run)
  authors.save(out, COMMIT, **KNOBS, batch=BATCH,
               clients=[(LABELED, UNLABELED)] * CLIENTS, **given,
               **{f'{run}_l1_thres': x for run, x in THRESHOLDS.items()},
               **results, **votes(theirs), **falls(theirs))


if __name__ == '__main__':
  main()
