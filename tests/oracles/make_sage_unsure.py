"""Asks SAGE's authors' code what it computes while a client is never sure.

Jay-Codeman/SAGE at e90fa96e0766fc2d6e4ea64625b7eec8aa1fd506: eight steps of a
client by the class Local of SAGE.py, as it is, on rows of which the model in
training is never sure and the received one is of half. There SAGE has only the
received model's labels, and of them only those that this model is sure of: so
FixMatch with global labels must train alike. Its own code, FixMatch-GPL of
SAGE's tables, is not in the repository. In the repository's root, with PyTorch
2.13:

python -m tests.oracles.make_sage_unsure --checkout=DIR \
    --out=tests/oracles/sage_unsure.npz
"""
from __future__ import annotations

import numpy as np

from tests.oracles import authors, make_sage

THRESHOLD, RATE = 0.9, 0.05


def main() -> None:
  checkout, out = authors.arguments(
      __doc__, 'Jay-Codeman/SAGE', make_sage.COMMIT)
  torch, theirs = make_sage.start(checkout, 'SAGE')
  theirs.logging = watch = authors.Watch(
      'logits_u_w', 'logits_u_w_global', 'targets_u_local', 'targets_u_global',
      'mask_valid', 'mask_local', 'Lx', 'Lu')
  rng = np.random.default_rng(7)
  rows = make_sage.draw(rng, make_sage.LABELED + make_sage.UNLABELED)
  weights = authors.draw_normalized(
      rng, make_sage.WIDTH, make_sage.HIDDEN, make_sage.CLASSES)
  # Smaller than that of any batch: the received model is surer of all rows.
  weights['variance'] /= 10
  theirs.ResNet = lambda **knobs: authors.normalized(torch, weights)
  args = make_sage.arguments()
  args.threshold, args.lr_local_training = THRESHOLD, RATE
  client = theirs.Local(args)
  client.fixmatch_train(
      args, *make_sage.datasets(torch, **rows, known=make_sage.LABELED),
      authors.normalized(torch, weights).state_dict(), 0)
  if any(row['mask_local'].any() for row in watch.rows):
    raise ValueError('the model in training is sure of some row')
  authors.save(
      out, make_sage.COMMIT, threshold=THRESHOLD, weight=args.lambda_u,
      rate=RATE, momentum=make_sage.MOMENTUM, decay=make_sage.DECAY,
      num_labeled=make_sage.LABELED, labeled_batch=make_sage.LABELED_BATCH,
      unlabeled_batch=make_sage.RATIO * make_sage.LABELED_BATCH,
      steps=len(watch.rows), **rows, **weights, **watch.stacked(),
      **authors.numbers_of(client.local_model, 'after_'))


if __name__ == '__main__':
  main()
