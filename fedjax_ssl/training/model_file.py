"""One file with a server's record, for `numpy.load`, and what it is made of."""
from __future__ import annotations

from collections.abc import Mapping
import io
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl.core import disk, run_files
from fedjax_ssl.core.types import PyTree
from fedjax_ssl.data import files


def write(path: str | os.PathLike[str], record: PyTree,
          about: Mapping[str, Any]) -> None:
  """Writes a record's arrays by name and, as JSON, what it is made of.

  Args:
    path: of the file.
    record: the server's.
    about: what JSON can hold; with `round`, those done.

  Raises:
    ValueError: if the file cannot be written, or belongs to a run.
  """
  run_files.check_free(pathlib.Path(path))
  arrays: dict[str, Any] = {
      name: np.asarray(leaf) for name, leaf in _named(record).items()}
  whole = io.BytesIO()
  np.savez(whole, about=np.array(json.dumps(about)), **arrays)
  with disk.writing(path):
    disk.replace(pathlib.Path(path), whole.getvalue())


def read(path: str | os.PathLike[str]
         ) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Reads what `write` wrote: what it is made of, and the arrays by name.

  Raises:
    ValueError: if the file cannot be read, or is another one.
  """
  try:
    arrays = files.read_arrays(path)
    about = json.loads(str(arrays.pop('about')))
    about['round'] = int(about['round'])
  except (KeyError, TypeError, ValueError) as error:
    why = f': {error}' if isinstance(error, files.DataError) else ''
    raise ValueError(f'{os.fspath(path)} holds no model that Run.save wrote'
                     f'{why}.') from error.__cause__  # A fault of the system.
  return about, arrays


def record(arrays: Mapping[str, np.ndarray], shapes: PyTree) -> PyTree | None:
  """Puts arrays in the places of a record; None if they are of another one.

  Args:
    arrays: as `read` returns them.
    shapes: the record, whose leaves have a shape and a dtype.
  """
  wanted = _named(shapes)
  if {name: (leaf.shape, leaf.dtype) for name, leaf in wanted.items()} != {
      name: (array.shape, array.dtype) for name, array in arrays.items()}:
    return None
  return jax.tree.unflatten(jax.tree.structure(shapes), [
      jnp.asarray(arrays[name]) for name in wanted])


def _named(tree: PyTree) -> dict[str, Any]:
  """Returns the leaves by name, in their order."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator='.')
          or 'server': leaf for path, leaf in leaves}
