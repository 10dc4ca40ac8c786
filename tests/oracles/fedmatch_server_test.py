"""FedMatch's server, which leaves out what ours does not.

See `make_fedmatch_server`; the rounds that it stored are in `fedmatch_test`.
"""
from __future__ import annotations

import numpy as np

from fedjax_ssl import sparse
from tests.oracles import fedmatch, ours

STORED = ours.stored('fedmatch_server')


def test_their_server_learns_without_the_small_numbers_of_psi():
  with ours.in_order():
    run = fedmatch.Run(STORED, 'cut')
    first = next(run.rounds())
    record = first.before.server
    small = record._replace(
        psi=sparse.cut(record.psi, float(STORED['cut_l1_thres'])))
    theirs = {f'w{i}': STORED[f'untold_sigma{i}'] for i in range(2)}
    ours.close(run.learned(small).sigma, theirs, 1e-6)
    mine = run.learned(record).sigma
    ours.close(mine, first.after.server.sigma, 1e-9)
    assert np.abs(mine['w0'] - theirs['w0']).max() > 1e-3
