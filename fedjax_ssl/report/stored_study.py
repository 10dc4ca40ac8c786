"""Reads studies that `fedjax-ssl results` stored, and makes tables of them."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import json
import pathlib
from typing import Any

from fedjax_ssl.report import study, text, verdict
from fedjax_ssl.training import environment


@contextlib.contextmanager
def reading(file: pathlib.Path) -> Iterator[dict[str, Any]]:
  """Reads a file of results, for a block that looks into it.

  Raises:
    ValueError: with the file's name, if it or what the block finds in it is
      not as it should be.
  """
  try:
    stored = json.loads(file.read_text('utf-8'))
    if not isinstance(stored, dict):
      raise TypeError('it is no object of JSON')
    yield stored
  except KeyError as error:
    raise ValueError(f'{file} is damaged: {error} is missing.') from error
  except (ValueError, TypeError, AttributeError, IndexError,
          RecursionError) as error:
    raise ValueError(f'{file} is damaged: {error}.') from error


def table(file: pathlib.Path) -> tuple[str, str]:
  """Returns title and table of a study's runs.

  Raises:
    ValueError: if the file is damaged.
  """
  with reading(file) as stored:
    return _table(file, stored)


def _table(file: pathlib.Path, stored: Mapping[str, Any]
           ) -> tuple[str, str]:
  runs = stored['runs']
  more = [name for name in study.MORE
          if any(any(run.get(name) or ()) for run in runs)]
  commits = sorted({environment.commit(r['environment']) for r in runs})
  lines = study.head([name.replace('_', ' ') for name in more])
  lines += [text.line([*study.first(run, run['method']),
                       *(_extra(run, name) for name in more)]) for run in runs]
  lines += ['', 'Test accuracy in percent, mean ± standard deviation over seeds'
            + ('; costs are percent of one dense model' if 'cost_up' in more
               else '') + f'. Commit {", ".join(commits)}. '
            f'[{file.name}]({file.name}) has every flag, seed, machine and '
            'cost.']
  return (stored.get('note') or file.stem), '\n'.join([*lines, *footnotes(
      (run['run'], verdict.stored(run)) for run in runs)])


def footnotes(verdicts: Iterable[tuple[str, Sequence[verdict.Verdict | None]]]
              ) -> list[str]:
  """Says what marks in a table mean, by the name of a run or cell."""
  said = verdict.footnotes(
      (f'`{name}`', found) for name, found in verdicts)
  return ['', ' '.join(said)] if said else []


def _extra(run: Mapping[str, Any], name: str) -> str:
  """Formats a number of `study.MORE`; empty where the run has none."""
  # A private run without a number is one without a bound, which is said.
  known = any(v is not None for v in run.get(name) or ())
  return study.more(run, name) if known or name == 'epsilon' else ''
