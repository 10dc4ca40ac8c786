"""A run with two saved steps, and how tests look at them."""
import pathlib
import shutil
from typing import Any, NamedTuple

import chex
import jax
import ml_dtypes
import numpy as np
import pytest

from fedjax_ssl.training import checkpoint

REPOSITORY = pathlib.Path(__file__).parents[2]


class Server(NamedTuple):
  params: Any
  count: Any
  unused: Any = ()


class Carry(NamedTuple):
  server: Any
  memory: Any
  round: Any


def make_tree(round_: int) -> Carry:
  """A state with all that methods put into one; other numbers every round."""
  rng = np.random.default_rng(round_)
  kernel = rng.normal(size=(40, 30)).astype(np.float32)
  kernel[0, :3] = [np.nan, -0.0, np.inf]
  params = {'conv 1/w': kernel, 'half': rng.normal(size=5).astype(
      ml_dtypes.bfloat16), 'none': {}, 'no_rows': np.zeros((0, 3), np.float32)}
  memory = (rng.integers(0, 2, (6, 4)).astype(bool), [
      rng.integers(0, 2**32, 6, np.uint32), None, np.float32(round_)])
  return Carry(Server(params, np.int32(7 * round_)), memory, np.int32(round_))


def assert_same_bits(got: Any, want: Any) -> None:
  chex.assert_trees_all_equal_structs(got, want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    a, b = np.asarray(a), np.asarray(b)
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert a.tobytes() == b.tobytes()


def files(folder: pathlib.Path) -> dict[str, bytes]:
  return {str(p.relative_to(folder)): p.read_bytes()
          for p in sorted(folder.rglob('*')) if p.is_file()}


@pytest.fixture(scope='module')
def two_steps(tmp_path_factory) -> pathlib.Path:
  """A folder with rounds 1 and 2; copy it, do not change it."""
  folder = tmp_path_factory.mktemp('two') / 'checkpoints'
  steps = checkpoint.Checkpoints(folder)
  steps.save(1, make_tree(1))
  steps.save(2, make_tree(2))
  return folder


@pytest.fixture
def folder(two_steps: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
  return pathlib.Path(shutil.copytree(two_steps, tmp_path / 'checkpoints'))


def restore(folder: pathlib.Path) -> tuple[int, Any] | None:
  """What a new process would find."""
  return checkpoint.Checkpoints(folder).restore(make_tree(0))


def assert_restores(folder: pathlib.Path, *rounds: int) -> int:
  """The newest sound step is one of these, with its own bits."""
  result = restore(folder)
  assert result is not None
  assert result[0] in rounds
  assert_same_bits(result[1], make_tree(result[0]))
  return result[0]
