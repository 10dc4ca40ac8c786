"""Asks TorchSSL's FixMatch what it computes.

TorchSSL/TorchSSL at f26e1d42967cec7f7c8a00c2e7ff9219d8ab7c92: the loss of
models/fixmatch/fixmatch_utils.py, and nine steps of the loop of
models/fixmatch/fixmatch.py. In the repository's root, with PyTorch 2.13:

python -m tests.oracles.make_fixmatch --checkout=DIR \
    --out=tests/oracles/fixmatch.npz
"""
from __future__ import annotations

from tests.oracles import authors, torchssl

THRESHOLD, WEIGHT = 0.6, 1.5


def main() -> None:
  checkout, out = authors.arguments(__doc__, torchssl.REPOSITORY,
                                    torchssl.COMMIT)
  torch = torchssl.start(checkout)
  method = authors.load(checkout, 'models.fixmatch.fixmatch')
  given = torchssl.logits(1)
  weak = torch.tensor(given['weak_logits'])
  (loss, rate, chosen, labels), slope = torchssl.gradient(
      torch, lambda strong: method.consistency_loss(
          strong, weak, 'ce', 1.0, THRESHOLD, use_hard_labels=True),
      given['strong_logits'])
  problem = torchssl.problem(2)
  after, terms = torchssl.train(
      torch, checkout, method.FixMatch, problem, WEIGHT, T=0.5,
      p_cutoff=THRESHOLD)
  authors.save(
      out, torchssl.COMMIT, threshold=THRESHOLD, weight=WEIGHT,
      **torchssl.settings(), **given, loss=loss.item(), mask_rate=rate.item(),
      accepted=chosen.numpy(), chosen=labels.numpy(), gradient=slope,
      **problem, **after, **terms)


if __name__ == '__main__':
  main()
