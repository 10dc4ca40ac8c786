"""Asks USB's AdaMatch what it computes.

microsoft/Semi-supervised-learning at 1ef4cbebcc0b368158315aeb425053858cf6c845,
which is not by AdaMatch's authors: nine steps of
semilearn/algorithms/adamatch/adamatch.py, and what its hooks keep. In the
repository's root, with PyTorch 2.13:

python -m tests.oracles.make_adamatch --checkout=DIR \
    --out=tests/oracles/adamatch.npz
"""
from __future__ import annotations

from tests.oracles import authors, torchssl, usb

WEIGHT, DECAY, THRESHOLD = 1.5, 0.6, 0.9


def main() -> None:
  checkout, out = authors.arguments(__doc__, usb.REPOSITORY, usb.COMMIT)
  torch = usb.start(checkout)
  problem = torchssl.problem(15)
  made, after, terms = usb.train(
      torch, usb.method(checkout, 'adamatch', 'AdaMatch'), problem, WEIGHT,
      ema_p=DECAY, p_cutoff=THRESHOLD)
  kept = made.hooks_dict['DistAlignHook']
  authors.save(
      out, usb.COMMIT, weight=WEIGHT, decay=DECAY, **torchssl.settings(),
      threshold=THRESHOLD, shares=kept.p_model.numpy(),
      target=kept.p_target.numpy(),
      **problem, **after, **terms)


if __name__ == '__main__':
  main()
