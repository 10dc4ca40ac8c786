"""The benchmark of bits finds those that differ, and trains as it says."""
from __future__ import annotations

import json

from absl import flags
import numpy as np
import pytest


@pytest.fixture
def script(bench, tmp_path):
  made = bench('same_bits')
  flags.FLAGS(['', '--quick', f'--out={tmp_path}'])
  made.harness.shrink(made.QUICK)
  return made


@pytest.mark.parametrize('change,same,most', [
    (0., True, 0.), (2.**-23, False, 2.**-23)])
def test_one_bit_is_found(script, change, same, most):
  one = script.Trained([np.ones(3, np.float32), np.int32(2)], 0.)
  other = script.Trained(
      [np.array([1, 1, 1 + change], np.float32), np.int32(2)], 0.)
  assert script.compared(one, other) == (same, most)


def test_another_sign_of_zero_is_another_bit(script):
  one, other = (script.Trained([np.float32(x)], 0.) for x in (0., -0.))
  assert script.compared(one, other) == (False, 0.)


def test_a_run_that_fails_is_said(script, tmp_path):
  flags.FLAGS['train_flags'].value = ['num_clients=0']
  with pytest.raises(ValueError, match='num_clients'):
    script.trained(tmp_path / 'run', tmp_path / 'cache', 2)


@pytest.mark.thorough
def test_here_all_bits_are_the_same(script, tmp_path):
  script.main()
  found = json.loads((tmp_path / 'same_bits_quick.json').read_text())
  for name in ('again', 'continued', 'compiled anew'):
    assert found['measured'][name]['same'], name
