"""Asks TorchSSL's FlexMatch what it computes.

TorchSSL/TorchSSL at f26e1d42967cec7f7c8a00c2e7ff9219d8ab7c92, by FlexMatch's
authors: the loss of models/flexmatch/flexmatch_utils.py, and nine steps of the
loop of models/flexmatch/flexmatch.py with what it remembers of the rows. In the
repository's root, with PyTorch 2.13:

python -m tests.oracles.make_flexmatch --checkout=DIR \
    --out=tests/oracles/flexmatch.npz
"""
from __future__ import annotations

import numpy as np

from tests.oracles import authors, torchssl

THRESHOLD, WEIGHT = 0.7, 1.5


def main() -> None:
  checkout, out = authors.arguments(__doc__, torchssl.REPOSITORY,
                                    torchssl.COMMIT)
  torch = torchssl.start(checkout)
  method = authors.load(checkout, 'models.flexmatch.flexmatch')
  given = torchssl.logits(3)
  weak = torch.tensor(given['weak_logits'])
  shares = np.array([1.0, 0.25, 0.0, 0.6])  # beta of each class.
  (loss, rate, chosen, labels, _), slope = torchssl.gradient(
      torch, lambda strong: method.consistency_loss(
          strong, weak, torch.tensor(shares), None, None, 'ce', 1.0,
          THRESHOLD, use_hard_labels=True), given['strong_logits'])
  problem = torchssl.problem(15)
  rows = len(problem['inputs']) - int(problem['num_labeled'])
  # What the loop keeps in a variable of its own passes through its loss.
  memory, betas, theirs = np.full(rows, -1), [], method.consistency_loss
  places = iter(torchssl.slices(rows, torchssl.UNLABELED_BATCH,
                                torchssl.STEPS))

  def watched(strong, weak, beta, *args, **knobs):
    betas.append(beta.numpy().copy())
    result = theirs(strong, weak, beta, *args, **knobs)
    sure, now = result[2].numpy() == 1, next(places)
    memory[now[sure]] = result[3].numpy()[sure]
    return result

  method.consistency_loss = watched
  after, terms = torchssl.train(
      torch, checkout, method.FlexMatch, problem, WEIGHT, T=0.5,
      p_cutoff=THRESHOLD, args={'thresh_warmup': True, 'use_DA': False})
  authors.save(
      out, torchssl.COMMIT, threshold=THRESHOLD, weight=WEIGHT,
      **torchssl.settings(), **given, shares=shares, loss=loss.item(),
      mask_rate=rate.item(), sure=chosen.numpy(), chosen=labels.numpy(),
      gradient=slope, betas=np.array(betas), memory=memory, **problem,
      **after, **terms)


if __name__ == '__main__':
  main()
