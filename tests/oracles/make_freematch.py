"""Asks USB's FreeMatch what it computes.

microsoft/Semi-supervised-learning at 1ef4cbebcc0b368158315aeb425053858cf6c845,
by FreeMatch's authors: nine steps of
semilearn/algorithms/freematch/freematch.py, and what its hooks keep. In the
repository's root, with PyTorch 2.13:

python -m tests.oracles.make_freematch --checkout=DIR \
    --out=tests/oracles/freematch.npz
"""
from __future__ import annotations

from tests.oracles import authors, torchssl, usb

WEIGHT, DECAY, FAIRNESS = 1.5, 0.6, 0.2


def main() -> None:
  checkout, out = authors.arguments(__doc__, usb.REPOSITORY, usb.COMMIT)
  torch = usb.start(checkout)
  problem = torchssl.problem(15)
  made, after, terms = usb.train(
      torch, usb.method(checkout, 'freematch', 'FreeMatch'), problem, WEIGHT,
      ema_p=DECAY, ent_loss_ratio=FAIRNESS, use_quantile=False,
      clip_thresh=False)
  kept = made.hooks_dict['MaskingHook']
  authors.save(
      out, usb.COMMIT, weight=WEIGHT, decay=DECAY, **torchssl.settings(),
      fairness=FAIRNESS, confidence=kept.time_p.item(),
      shares=kept.p_model.numpy(), histogram=kept.label_hist.numpy(),
      **problem, **after, **terms)


if __name__ == '__main__':
  main()
