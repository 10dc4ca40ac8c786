"""Asks ProxyFL's authors' code what it computes.

DuowenC/FSSLlib at f732a279d0ea4f9e9c7d9022164dc96ef6c0ab78, its folder ProxyFL:
the contrast of rows by Local.ICPL of proxyfl.py, and a round by its classes
Local and Global: two epochs of each of two clients, the mean, the tuning of its
proxies, and the prior. Each client has a Local of its own, so that none
inherits an optimizer's momentum. On a small network with batch norm, rows and
proxies in order. In the repository's root, with PyTorch 2.13:

python -m tests.oracles.make_proxyfl --checkout=DIR \
    --out=tests/oracles/proxyfl.npz
"""
from __future__ import annotations

import types
from typing import Any

import numpy as np

from tests.oracles import authors, make_sage

COMMIT = 'f732a279d0ea4f9e9c7d9022164dc96ef6c0ab78'
HIDDEN, CLASSES = make_sage.HIDDEN, make_sage.CLASSES
CLIENTS = (8, 16), (4, 12)  # Rows with labels and without.
BATCH = 4  # Of both, so that an epoch sees the rows once.
TUNING_EPOCHS, TUNING_RATE, TUNING_BATCH, MARGIN = 3, 0.05, 3, 100.0
PRIOR = (0.4, 0.3, 0.2, 0.1)


def draw_weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
  """Draws a network and its two projections."""
  def square() -> np.ndarray:
    return rng.normal(size=(HIDDEN, HIDDEN)) / HIDDEN ** 0.5
  return {**authors.draw_normalized(
      rng, make_sage.WIDTH, HIDDEN, CLASSES, 1.5),
          'features_kernel': square(), 'proxies_kernel': square(),
          'features_bias': rng.normal(size=HIDDEN) * 0.1}


def network(torch: Any, weights: dict[str, np.ndarray]) -> Any:
  """A network as their ResNet_PC is, for rows of numbers."""
  net = authors.normalized(torch, weights)
  net.feat_proj = torch.nn.Linear(HIDDEN, HIDDEN)
  net.proxy_proj = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
  with torch.no_grad():
    for name, place in projections(net).items():
      place.copy_(torch.tensor(weights[name].T))
  # Of these the width of the proxies is made.
  net.scaling, net.block_fn = HIDDEN / 64, types.SimpleNamespace(expansion=1)
  return net


def projections(net: Any) -> dict[str, Any]:
  """The tensors that `network` adds."""
  return {'features_kernel': net.feat_proj.weight,
          'features_bias': net.feat_proj.bias,
          'proxies_kernel': net.proxy_proj.weight}


def numbers_of(net: Any, prefix: str) -> dict[str, np.ndarray]:
  """What `network` was made of, as it is now."""
  return {**authors.numbers_of(net, prefix),
          **{prefix + name: place.detach().numpy().T.copy()
             for name, place in projections(net).items()}}


def contrast(torch: Any, client: Any, rng: np.random.Generator
             ) -> dict[str, Any]:
  """ICPL of some rows, one of them without a likely class, and its slope."""
  rows = 12
  features = torch.tensor(rng.normal(size=(rows, HIDDEN)), requires_grad=True)
  p = rng.dirichlet(np.ones(CLASSES), rows)
  p[1] = PRIOR
  sure = np.arange(rows) % 3 == 0
  value = client.ICPL(features, torch.tensor(p), torch.tensor(sure),
                      np.array(PRIOR))
  value.backward()
  proxies = client.local_model.classifier.weight
  slope = proxies.grad.numpy().T.copy()
  client.local_model.zero_grad()
  return {'features': features.detach().numpy(), 'probabilities': p,
          'sure': sure, 'contrast': value.item(),
          'features_slope': features.grad.numpy(), 'proxies_slope': slope}


def main() -> None:
  checkout, out = authors.arguments(__doc__, 'DuowenC/FSSLlib', COMMIT)
  torch, theirs = make_sage.start(checkout / 'ProxyFL', 'proxyfl')
  args = make_sage.arguments()
  args.lr_server, args.bs_server = TUNING_RATE, TUNING_BATCH
  args.gpt_threshold, args.num_rounds = MARGIN, 1
  args.total_server_epochs = TUNING_EPOCHS
  args.batch_size_local_labeled_fixmatch, args.mu = BATCH, 1
  rng = np.random.default_rng(7)
  weights = draw_weights(rng)
  theirs.args = args
  theirs.ResNet_PC = lambda **knobs: network(torch, weights)
  sent, counts, stored = [], [], {}
  rows = make_sage.draw(rng, sum(map(sum, CLIENTS)))
  places = np.split(np.arange(len(rows['labels'])),
                    np.cumsum([sum(c) for c in CLIENTS])[:-1])
  for i, (own, (known, _)) in enumerate(zip(places, CLIENTS, strict=True)):
    theirs.logging = watch = authors.Watch(
        'Lx', 'Lu', 'Lc', 'mask_valid', 'mask_x')
    client = theirs.Local(args)
    model, _, count = client.fixmatch_train(
        args, *make_sage.datasets(torch, **{
            k: v[own] for k, v in rows.items()}, known=known),
        network(torch, weights).state_dict(), 1, i, np.array(PRIOR))
    sent.append(model)
    counts.append(count)
    stored.update(watch.stacked(f'client{i}_'))
  theirs.logging = authors.Watch('')
  server = theirs.Global(args)
  fused, _ = server.initialize_for_model_fusion(
      sent, [sum(c) for c in CLIENTS])
  prior = server.update_global_distribution(np.array(PRIOR), counts)
  after = network(torch, weights)
  after.load_state_dict(fused)
  authors.save(
      out, COMMIT, threshold=args.threshold, weight=args.lambda_u,
      rate=make_sage.RATE, momentum=make_sage.MOMENTUM, decay=make_sage.DECAY,
      clients=CLIENTS, batch=BATCH, epochs=args.local_epochs, prior=PRIOR,
      tuning_epochs=TUNING_EPOCHS, tuning_rate=TUNING_RATE,
      tuning_batch=TUNING_BATCH, counts=np.array(counts), after_prior=prior,
      **rows, **weights, **stored, **numbers_of(after, 'after_'),
      **contrast(torch, theirs.Local(args), rng))


if __name__ == '__main__':
  main()
