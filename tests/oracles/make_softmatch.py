"""Asks USB's SoftMatch what it computes.

microsoft/Semi-supervised-learning at 1ef4cbebcc0b368158315aeb425053858cf6c845,
by SoftMatch's authors: nine steps of
semilearn/algorithms/softmatch/softmatch.py, and what its hooks keep. In the
repository's root, with PyTorch 2.13:

python -m tests.oracles.make_softmatch --checkout=DIR \
    --out=tests/oracles/softmatch.npz
"""
from __future__ import annotations

from tests.oracles import authors, torchssl, usb

WEIGHT, DECAY, SIGMAS = 1.5, 0.6, 2


def main() -> None:
  checkout, out = authors.arguments(__doc__, usb.REPOSITORY, usb.COMMIT)
  torch = usb.start(checkout)
  problem = torchssl.problem(15)
  made, after, terms = usb.train(
      torch, usb.method(checkout, 'softmatch', 'SoftMatch'), problem, WEIGHT,
      ema_p=DECAY, n_sigma=SIGMAS, dist_align=True, dist_uniform=True,
      per_class=False)
  kept = made.hooks_dict['MaskingHook']
  authors.save(
      out, usb.COMMIT, weight=WEIGHT, decay=DECAY, **torchssl.settings(),
      sigmas=SIGMAS, mean=kept.prob_max_mu_t.item(),
      variance=kept.prob_max_var_t.item(),
      shares=made.hooks_dict['DistAlignHook'].p_model.numpy(),
      **problem, **after, **terms)


if __name__ == '__main__':
  main()
