"""The header of a checkpoint: names, shapes, dtypes and hashes of leaves."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
import hashlib
import json
import os
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

PyTree = Any
FORMAT = 1
HEADER = 'header'  # The item of a step that holds the header.


class CheckpointError(ValueError):
  """A checkpoint cannot be written, or is not one of this run."""


class Spec(NamedTuple):
  """The shape and dtype of a leaf, which must agree before it is used."""

  shape: tuple[int, ...]
  dtype: str

  def __str__(self) -> str:
    return f'{self.dtype}[{", ".join(map(str, self.shape))}]'


def named(tree: PyTree) -> Iterator[tuple[str, Any]]:
  """Yields leaves with their dotted names, as in `server.params.kernel`."""
  seen = set()
  for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
    name = jax.tree_util.keystr(path, simple=True, separator='.') or 'value'
    if name in seen:
      raise CheckpointError(f'Two leaves of the state are called {name!r}.')
    seen.add(name)
    yield name, leaf


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
  """Makes a nested dict of leaves with dotted names."""
  tree: dict[str, Any] = {}
  for name, leaf in leaves.items():
    *folders, last = name.split('.')
    node = tree
    for folder in folders:
      node = node.setdefault(folder, {})
    node[last] = leaf
  return tree


def to_host(name: str, leaf: Any) -> np.ndarray:
  """Returns the whole leaf as a numpy array of numbers, on every process.

  All processes call this for the same leaves in the same order.

  Raises:
    CheckpointError: if it holds anything but numbers.
  """
  if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
    if leaf.is_fully_replicated:
      leaf = leaf.addressable_data(0)
    else:
      from jax.experimental import multihost_utils
      leaf = multihost_utils.process_allgather(leaf, tiled=True)
  try:
    array = np.asarray(leaf)
  except TypeError as error:
    raise CheckpointError(f'Leaf {name!r} is no array: {error}.') from None
  # Kind V without fields is how numpy sees bfloat16 and its relatives.
  if array.dtype.kind not in 'biufcV' or array.dtype.names:
    raise CheckpointError(f'Leaf {name!r} has dtype {array.dtype}; only '
                          'arrays of numbers are saved.')
  return array


def spec(leaf: Any) -> Spec:
  """Returns the spec of an array, a ShapeDtypeStruct or a Python number."""
  if not hasattr(leaf, 'dtype'):
    leaf = np.asarray(leaf)
  return Spec(tuple(leaf.shape), str(leaf.dtype))


def specs(header: Mapping[str, Any]) -> dict[str, Spec]:
  """Returns the specs of the leaves that a header lists, in their order."""
  return {name: Spec(tuple(shape), dtype)
          for name, shape, dtype in header['leaves']}


def make(round_: int, leaves: Mapping[str, np.ndarray],
         metadata: Mapping[str, Any]) -> dict[str, Any]:
  """Makes the header of a step: its leaves, their hash, and its own hash."""
  header = {
      'format': FORMAT,
      'round': round_,
      'leaves': [[name, *spec(leaf)] for name, leaf in leaves.items()],
      'metadata': dict(metadata),
      'content': content_hash(leaves),
  }
  try:
    header = json.loads(json.dumps(header, allow_nan=False))
  except (TypeError, ValueError) as error:
    raise CheckpointError(
        f'metadata={metadata!r} is no JSON: {error}.') from None
  return header | {'sha256': header_hash(header)}


def header_hash(header: Mapping[str, Any]) -> str:
  """Computes SHA-256 of a header, without the entry that holds the hash."""
  rest = {k: v for k, v in header.items() if k != 'sha256'}
  return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_header(step: pathlib.Path) -> dict[str, Any]:
  """Reads the header of a step, if it is exactly what was written.

  Raises:
    ValueError: if it is not.
    OSError: if it cannot be read.
  """
  # Where Orbax puts the JSON of an item; its reader takes a second to import.
  text = (step / HEADER / 'metadata').read_bytes()
  try:
    header = json.loads(text)
    good = header['sha256'] == header_hash(header)
    found = f'format {header["format"]}, round {header["round"]}'
  except (KeyError, TypeError, RecursionError) as error:
    raise ValueError(f'the header is malformed: {error!r}') from None
  if not good:
    raise ValueError('the header does not match its hash')
  if found != f'format {FORMAT}, round {step.name}':
    raise ValueError(f'the header is of {found}')
  return header


def rounds(directory: pathlib.Path) -> list[int]:
  """Lists rounds with a whole step, oldest first; it may be damaged."""
  try:
    names = os.listdir(directory)
  except (FileNotFoundError, NotADirectoryError):
    return []
  return sorted(int(n) for n in names if n.isascii() and n.isdigit()
                and n == str(int(n)) and (directory / n).is_dir())


def content_hash(leaves: Mapping[str, np.ndarray]) -> str:
  """Computes SHA-256 of all bytes, in the order of the leaves."""
  digest = hashlib.sha256()
  for leaf in leaves.values():
    digest.update(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data)
  return digest.hexdigest()


def check(step: str | os.PathLike[str], header: Mapping[str, Any],
          wanted: Mapping[str, Any]) -> None:
  """Compares a step's leaves with those of a template.

  Raises:
    CheckpointError: that names the first leaf that differs.
  """
  there = specs(header)
  here = {name: spec(leaf) for name, leaf in wanted.items()}
  for name in [*here, *(n for n in there if n not in here)]:
    if there.get(name) != here.get(name):
      raise CheckpointError(
          f'Checkpoint {os.fspath(step)} is of another model or method: '
          f'{name!r} is {there.get(name, "absent")} there and '
          f'{here.get(name, "absent")} here.')
