"""What a checkpoint vouches for: which run it is of, and the rows beside it.

The metadata of a step that a run saves has two entries. `run` is the SHA-256
of each thing that makes the run: its facts by name, and its flags. `files` is
the length and SHA-256 of metrics.jsonl and timings.jsonl when it was saved.
Steps of versions before these entries have neither, and are believed.
"""
from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
import hashlib
import json
import pathlib
from typing import Any

from fedjax_ssl.training.checkpoint import manifest

RUN = 'run'
FILES = 'files'
STEPS = 'checkpoints'
# Files that may be missing: a run can do without its times.
_SPARE = ('timings.jsonl',)

Seal = Mapping[str, Any]


class SealError(ValueError):
  """A file is not what its checkpoint was saved with."""


def identity(facts: Mapping[str, Any], flags: Mapping[str, Any] | None = None,
             free: Collection[str] = ()) -> dict[str, str]:
  """Computes the hashes of what makes a run.

  Args:
    facts: what follows from flags and data, by name.
    flags: the flags, or None where they are not at hand.
    free: flags that another start may change.

  Returns:
    By the fact's name, and under 'flags', a SHA-256.
  """
  parts = dict(facts)
  if flags is not None:
    parts['flags'] = {k: v for k, v in flags.items() if k not in free}
  # As a JSON file gives them back.
  plain = json.loads(json.dumps(parts))
  return {name: hashlib.sha256(json.dumps(
      value, sort_keys=True).encode()).hexdigest()
          for name, value in sorted(plain.items())}


def differing_facts(metadata: Mapping[str, Any], own: Mapping[str, str]) -> str:
  """Names the facts in which a step's run differs; '' for a step of this run.

  Versions may know different facts, so only common ones are compared.
  """
  said = metadata.get(RUN) or {}
  return ', '.join(name for name, value in own.items()
                   if said.get(name, value) != value)


def seal(data: bytes | bytearray) -> dict[str, Any]:
  """Returns what a checkpoint stores about a file."""
  return {'bytes': len(data), 'sha256': hashlib.sha256(data).hexdigest()}


def checked_bytes(name: str, wanted: Seal, data: bytes | None, round_: int
                  ) -> tuple[bytes, str]:
  """Returns what a file held at a checkpoint.

  Args:
    name: of the file.
    wanted: its seal.
    data: what it holds now, None if it is missing.
    round_: of the checkpoint.

  Returns:
    (bytes, fault): the file's first `wanted['bytes']` bytes, and what is wrong
    with them, empty if nothing. A lost timings file is replaced by one row with
    seconds=null.
  """
  length = wanted['bytes']
  gone = unknown_times(round_)
  if name in _SPARE and length and (data is None or data.startswith(gone)):
    return gone, ''
  data = data or b''
  sealed = data[:length]
  if not data and length:
    return sealed, 'is missing or empty'
  if len(data) < length:
    return sealed, f'ends after {len(data)} of {length} bytes'
  if seal(sealed) != wanted:
    return sealed, f'has other content in its first {length} bytes'
  return sealed, ''


def unknown_times(round_: int) -> bytes:
  """Returns the row that stands for unknown times up to a round."""
  return f'{json.dumps({"round": round_, "seconds": None})}\n'.encode()


def refusal(folder: pathlib.Path, name: str, round_: int, reason: str) -> str:
  """Returns one line: what is wrong, and how to go on."""
  found = f'{folder / name} {reason}: not as checkpoint {round_} left it.'
  if name in _SPARE:
    return (f'{found} Bring back a copy of it, or remove it: all goes on, and '
            'the times are unknown.')
  return f'{found} Bring back a copy of it, or {_way_on(folder, round_)}'


def _way_on(folder: pathlib.Path, round_: int) -> str:
  """How to go on: from an older step whose rows are whole, or from round 0."""
  steps = folder / STEPS
  for older, metadata in headers(folder):
    files = metadata.get(FILES)
    if older < round_ and files and not any(
        checked_bytes(name, wanted, content(folder / name), older)[1]
        for name, wanted in files.items()):
      later = [str(steps / str(r)) for r in manifest.rounds(steps)
               if r > older]
      return (f'remove {" and ".join(later)} and give the same command again: '
              f'it goes on from round {older}.')
  return (f'remove {steps} and give the same command again: it starts over '
          'from round 0.')


def content(file: pathlib.Path) -> bytes | None:
  """Reads the bytes of a file; None if there is none."""
  try:
    return file.read_bytes()
  except FileNotFoundError:
    return None


def headers(folder: pathlib.Path) -> Iterator[tuple[int, dict[str, Any]]]:
  """Rounds and metadata of the steps that can be read, newest first."""
  for round_ in reversed(manifest.rounds(folder / STEPS)):
    try:
      header = manifest.read_header(folder / STEPS / str(round_))
    except (ValueError, OSError):
      continue
    yield round_, header['metadata']
