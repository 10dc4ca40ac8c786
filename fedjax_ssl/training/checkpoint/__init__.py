"""Checkpoints: one atomic Orbax step per save, checked before it is used.

A step is the folder `<directory>/<round>`. It holds two Orbax items: `state`,
a plain nested dict of arrays (NamedTuples by field name, tuples by index),
and `header`, JSON with the names, shapes and dtypes of all leaves, the
caller's metadata, and the SHA-256 of the bytes. Orbax writes a step next to
its final place and renames it, so a kill leaves either a whole step or a
folder that is ignored. Nothing is ever unpickled.

The order of writes, each on the disk before the next begins:

1. Rows: `metrics.MetricsWriter.write` appends one to metrics.jsonl, then one
   to timings.jsonl.
2. Seals: `MetricsWriter.seals` gives length and SHA-256 of both files, and
   mends a file that others changed. They go into the step's metadata, so that a
   step never vouches for rows that may be lost.
3. The step, `Checkpoints.save`: leaves come to the host, `manifest.make` hashes
   them, Orbax writes both items and renames the folder. Orbax does not flush;
   `disk.fsync_tree` does, files first, then the folders.
4. Only then older steps go, all but the newest `keep`. So a power loss damages
   at most the newest step, and its hashes show it.

A start goes the other way. `Checkpoints.restore` takes the newest step whose
header and bytes match their hashes; its leaves must be those of the template,
and its run this run. Then `MetricsWriter` checks both files against that step's
seals and cuts off the rows after them, which will be measured again.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import contextlib
import gc
import logging as std_logging
import os
import pathlib
import shutil
import sys
import time
from typing import Any

from absl import logging
import jax
import numpy as np

from fedjax_ssl.core import checks, disk
from fedjax_ssl.training import processes
from fedjax_ssl.training.checkpoint import manifest, sealed

PyTree = Any
CheckpointError = manifest.CheckpointError
_STATE = 'state'
# Orbax's suffix for a step that is being written.
_PARTIAL = '.orbax-checkpoint-tmp'
_FULL = 'No space left on device'


class SaveError(CheckpointError):
  """A step cannot be written now; earlier ones are kept."""

  may_pass = True  # Another try may find room.


class _StepError(Exception):
  """A step cannot be written, or is there but cannot be trusted."""


class Checkpoints:
  """The steps of one run.

  In a run of several processes every process calls `save` and `restore`. The
  first one reads and writes, so that the folder may be on its own disk; the
  others send and receive. A step does not say how many devices or processes
  wrote it, and any number may continue from it.
  """

  def __init__(self, directory: str | os.PathLike[str], *, keep: int = 2,
               run: Mapping[str, str] | None = None):
    """Names the folder; it is created by the first save.

    Args:
      directory: local folder of the steps.
      keep: number of newest steps that survive a save. 1 leaves nothing to
        fall back on when the newest step is damaged.
      run: `sealed.identity` of the run. It goes into every step that is
        saved, and steps of another run are refused. None accepts any.

    Raises:
      ValueError: if `keep` is below 1.
      CheckpointError: if the folder is something else.
    """
    if keep < 1:
      raise ValueError(f'keep={keep} must be at least 1.')
    self._directory = pathlib.Path(directory).absolute()
    if self._directory.exists() and not self._directory.is_dir():
      raise CheckpointError(f'{self._directory} is no folder; checkpoints go '
                            'there.')
    self._keep = keep
    self._run = dict(run) if run else None
    self._orbax: Any = None

  def rounds(self) -> list[int]:
    """Lists rounds with a whole step, oldest first; it may be damaged."""
    return manifest.rounds(self._directory)

  def latest(self) -> int | None:
    """Returns the newest round that has a whole step, or None."""
    return max(self.rounds(), default=None)

  def save(self, round_: int, tree: PyTree,
           metadata: Mapping[str, Any] | None = None) -> None:
    """Writes one step and returns when it is on the disk.

    A step of the same round with the same content is left as it is; one with
    other content (damaged, as a rule) is renamed, not deleted. Then all but
    the newest `keep` steps up to this round are removed.

    Args:
      round_: rounds done so far, at least 0.
      tree: pytree of arrays of numbers; the first process holds a whole copy
        in host memory while it saves, the others a leaf at a time.
      metadata: small JSON values to store with it.

    Raises:
      SaveError: if the step cannot be written (full disk, no permission).
      CheckpointError: if a leaf is no array of numbers. Earlier steps stay.
    """
    leaves = {}
    for name, leaf in manifest.named(tree):
      host = manifest.to_host(name, leaf)
      if processes.is_first():
        leaves[name] = host
    said = dict(metadata or {})
    if self._run is not None:
      said[sealed.RUN] = self._run
    processes.once(lambda: self._save(int(round_), leaves, said))

  def _save(self, round_: int, leaves: dict[str, np.ndarray],
            metadata: Mapping[str, Any]) -> None:
    """`save` of leaves on the host."""
    header = manifest.make(round_, leaves, metadata)
    step = self._directory / str(round_)
    try:
      with _one_line_if_it_fails():
        if step.exists() and not self._make_room(step, header):
          return
        self._write(step, leaves, header)
    except _StepError as error:
      disk.remove(pathlib.Path(f'{step}{_PARTIAL}'))
      raise SaveError(
          f'Cannot save round {round_} in {self._directory}: {error}.'
          + ' Earlier steps are kept.' * bool(self.rounds())) from None
    for old in [r for r in self.rounds() if r <= round_][:-self._keep]:
      shutil.rmtree(self._directory / str(old), ignore_errors=True)

  def restore(self, template: PyTree) -> tuple[int, PyTree] | None:
    """Reads the newest sound step; warns of damaged ones and skips them.

    Args:
      template: pytree of the structure wanted. An array on a device, or a
        `jax.ShapeDtypeStruct` with a sharding, is restored to the same
        sharding; everything else to a numpy array.

    Returns:
      The round and the tree, bit for bit as saved; None if there is no sound
      step, which the log says if there are damaged ones. Nothing is deleted.

    Raises:
      CheckpointError: if the step is sound but has other leaves, shapes or
        dtypes than the template, the first of which the message names, or if
        it is of another run.
    """
    wanted = dict(manifest.named(template))
    read: dict[str, np.ndarray] = {}

    def look() -> int | None:
      found = self._newest(wanted)
      if found is None:
        return None
      read.update(found[1])
      return found[0]

    round_ = processes.once(look)
    if round_ is None:
      return None
    placed = [_place(_shared(read.pop(name, None), leaf), leaf)
              for name, leaf in wanted.items()]
    return round_, jax.tree.unflatten(jax.tree.structure(template), placed)

  def _newest(self, wanted: Mapping[str, Any]
              ) -> tuple[int, dict[str, np.ndarray]] | None:
    """Round and leaves of the newest sound step."""
    tried: set[int] = set()
    # They are listed each time: a run in training removes steps as it goes on.
    while left := {*self.rounds()} - tried:
      round_ = max(left)
      tried.add(round_)
      step = self._directory / str(round_)
      try:
        header = self._read_header(step)
        manifest.check(step, header, wanted)
        self._check_run(step, header['metadata'])
        return round_, self._read_leaves(step, header)
      except _StepError as error:
        # One that is being removed looks damaged.
        if not any(newer > round_ for newer in {*self.rounds()} - tried) and (
            step.exists()):
          logging.warning(
              'Checkpoint %s is damaged (%s)%s.', step, error,
              '; using the one before it' if {*self.rounds()} - tried else '')
    if tried:
      logging.warning('No checkpoint in %s can be read.', self._directory)
    return None

  def _check_run(self, step: pathlib.Path, metadata: Mapping[str, Any]
                 ) -> None:
    """Raises CheckpointError for a step of another run."""
    if self._run is None:
      return
    if sealed.RUN not in metadata:
      logging.warning(
          'Checkpoint %s is of an earlier version: it does not say of which '
          'run it is, nor what metrics.jsonl held. It is believed.', step)
    elif names := sealed.differing_facts(metadata, self._run):
      raise CheckpointError(
          f'Checkpoint {step} is of another run: it differs in {names}. '
          f'Remove it to use the one before it, or remove {self._directory} '
          'to start over.')

  def is_sound(self, round_: int) -> bool:
    """Returns whether a step's bytes are those that were written."""
    step = self._directory / str(round_)
    try:
      self._read_leaves(step, self._read_header(step))
    except _StepError:
      return False
    return True

  def metadata(self, round_: int) -> dict[str, Any]:
    """Returns the metadata stored with a round.

    Raises:
      CheckpointError: if that step is missing or damaged.
    """
    step = self._directory / str(round_)
    try:
      return self._read_header(step)['metadata']
    except _StepError as error:
      raise CheckpointError(f'Checkpoint {step}: {error}.') from None

  def _checkpointer(self) -> tuple[Any, Any]:
    """Orbax and its checkpointer; the import costs over a second."""
    import orbax.checkpoint as ocp
    if self._orbax is None:
      # Threads that wait for a folder that cannot be made would keep a failed
      # process from ending for five minutes.
      alone = ocp.options.MultiprocessingOptions(
          primary_host=jax.process_index(),
          active_processes={jax.process_index()},
          barrier_sync_key_prefix='fedjax_ssl',
      ) if processes.count() > 1 else ocp.options.MultiprocessingOptions()
      options = ocp.CompositeOptions(
          multiprocessing_options=alone,
          async_options=ocp.options.AsyncOptions(
              create_directories_asynchronously=False))
      with _quiet():
        self._orbax = ocp.Checkpointer(
            ocp.CompositeCheckpointHandler(composite_options=options),
            multiprocessing_options=alone)
    return ocp, self._orbax

  def _write(self, step: pathlib.Path, leaves: dict[str, np.ndarray],
             header: dict[str, Any]) -> None:
    """Writes one step under its final name, flushed to the disk."""
    self._directory.mkdir(parents=True, exist_ok=True)
    ocp, checkpointer = self._checkpointer()
    items = {manifest.HEADER: ocp.args.JsonSave(header)}
    state = manifest.nest({k: v for k, v in leaves.items() if v.size})
    if state:  # Orbax refuses arrays without elements, and empty trees.
      items[_STATE] = ocp.args.PyTreeSave(state)
    with _quiet():
      checkpointer.save(step, args=ocp.args.Composite(**items))
    disk.fsync_tree(step)

  def _make_room(self, step: pathlib.Path, header: dict[str, Any]) -> bool:
    """Whether the step must be written; renames one of other content."""
    try:
      old = self._read_header(step)
      self._read_leaves(step, old)
      if old == header:
        return False
    except _StepError:
      pass
    aside = disk.aside(step)
    os.rename(step, aside)
    logging.warning('Checkpoint %s is replaced; the old one is now %s.',
                    step, aside.name)
    return True

  def _read_header(self, step: pathlib.Path) -> dict[str, Any]:
    """Returns the header of a step, if it is exactly what was written."""
    with _one_line_if_it_fails():
      header = manifest.read_header(step)
    return header

  def _read_leaves(self, step: pathlib.Path, header: dict[str, Any]
                   ) -> dict[str, np.ndarray]:
    """Returns the arrays of a step, if they are exactly what was written."""
    ocp, checkpointer = self._checkpointer()
    specs = manifest.specs(header)
    stored = [name for name, spec in specs.items() if 0 not in spec.shape]
    leaves = {name: np.zeros(spec.shape, np.dtype(spec.dtype))
              for name, spec in specs.items() if 0 in spec.shape}
    with _one_line_if_it_fails():
      if stored:
        want = ocp.RestoreArgs(restore_type=np.ndarray)
        items = {_STATE: ocp.args.PyTreeRestore(
            item=manifest.nest(dict.fromkeys(stored, 0)),
            restore_args=manifest.nest(dict.fromkeys(stored, want)))}
        state = checkpointer.restore(
            step, args=ocp.args.Composite(**items))[_STATE]
        leaves.update(manifest.named(state))
      if {k: manifest.spec(v) for k, v in leaves.items()} != specs:
        raise ValueError('leaves are missing or of another shape')
      leaves = {name: leaves[name] for name in specs}
      if header['content'] != manifest.content_hash(leaves):
        raise ValueError('the bytes do not match their hash')
    return leaves


def _shared(value: np.ndarray | None, template: Any) -> np.ndarray:
  """Returns the first process's leaf, on all of them."""
  if processes.count() == 1 and value is not None:
    return value
  like = manifest.spec(template)
  data = None if value is None else np.ascontiguousarray(value).tobytes()
  return np.frombuffer(
      bytearray(processes.share(data)), np.dtype(like.dtype)
  ).reshape(like.shape)


def _place(value: np.ndarray, template: Any) -> Any:
  """Puts a leaf where the template's leaf is."""
  if isinstance(template, jax.Array) and not template.committed:
    # A committed array would be another argument type to a jitted function.
    return jax.numpy.array(value)
  sharding = getattr(template, 'sharding', None)
  if sharding is None:
    return value
  return jax.make_array_from_callback(
      value.shape, sharding, lambda index: value[index])


@contextlib.contextmanager
def _one_line_if_it_fails() -> Iterator[None]:
  """Turns every failure into _StepError: garbage fails in many ways."""
  reason = ''
  with _quiet():
    try:
      yield
    except Exception as error:
      reason = _cut(error)
    if reason:
      # Orbax's other tasks fail a little later, or when they are collected.
      gc.collect()
      time.sleep(0.05)
  if reason:
    # Some of them fail much later, if the processor is busy.
    if not isinstance(sys.unraisablehook, _Report):
      sys.unraisablehook = _Report(sys.unraisablehook)
    raise _StepError(reason)


class _Report:
  """Reports unraisable errors, but not of tasks whose event loop is closed."""

  def __init__(self, report: Callable[[Any], Any]):
    self._report = report

  def __call__(self, unraisable: Any) -> None:
    if str(unraisable.exc_value) != 'Event loop is closed':
      self._report(unraisable)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Keeps what Orbax and its threads say out of the run's log."""
  report = sys.unraisablehook

  def keep(record: std_logging.LogRecord) -> bool:
    return record.name != 'asyncio' and 'orbax' not in record.pathname

  loggers = [std_logging.getLogger(name) for name in ('absl', 'asyncio')]
  for logger in loggers:
    logger.addFilter(keep)
  sys.unraisablehook = _Report(report)
  try:
    yield
  finally:
    sys.unraisablehook = report
    for logger in loggers:
      logger.removeFilter(keep)


def _cut(error: BaseException) -> str:
  text = checks.one_line(error)
  if _FULL in text:  # TensorStore says so at the end, behind names of its own.
    return 'the disk is full'
  return text if len(text) <= 200 else text[:197] + '...'
