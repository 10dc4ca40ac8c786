"""Marks runs whose numbers mislead: diverged, of one class, or guesses.

A verdict changes no number and hides none: it is a mark beside it and a
footnote.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import re
from typing import Any, NamedTuple

from fedjax_ssl.report.text import by_text

DIVERGED = 'diverged'
# Untrained networks do so as well as collapsed ones: it says what was seen.
ONE_CLASS = 'one class'
GUESSES = 'guesses'
MARKS = {DIVERGED: '†', ONE_CLASS: '†', GUESSES: '‡'}
# What legends say.
SHORT = {DIVERGED: 'diverged', ONE_CLASS: 'predicts one class',
         GUESSES: 'hardly above the largest class'}
# Nats, as a mean over the test examples: even a model that is sure and wrong
# each time stays far below.
MOST_LOSS = 100.0
# Weights of networks that learn are of the order of 1.
MOST_WEIGHT = 1e4
# A model predicts one class if at most this fraction of (1 - share of the
# largest class) gets any other prediction.
_FEW = 0.05


class Verdict(NamedTuple):
  """Something to say about the last row of a seed."""

  kind: str  # DIVERGED, ONE_CLASS or GUESSES.
  reason: str  # Continues the run's name.


def bar(largest_class: float) -> float:
  """Computes the accuracy, 0 to 1, up to which a model counts as guessing.

  The largest class's share plus a margin: the smallest of 0.05, half that
  share, and half of one minus it.
  """
  return largest_class + min(0.05, largest_class / 2, (1 - largest_class) / 2)


def of(row: Mapping[str, Any]) -> Verdict | None:
  """Judges an evaluated row; None if there is nothing to say.

  Older rows lack some fields. Without `largest_class` its share is taken as
  1 / C, a lower bound.
  """
  if reason := _absurd(row):
    return Verdict(DIVERGED, reason)
  if reason := _one_class(row):
    return Verdict(ONE_CLASS, reason)
  largest, accuracy = _largest_class(row), row.get('accuracy')
  if largest is None or accuracy is None or accuracy > bar(largest):
    return None
  if largest == 1:  # Of rows of one class: nothing is more accurate.
    return None
  return Verdict(
      GUESSES, f'less than {100 * (bar(largest) - largest):.2f} points above '
      f'the largest class ({100 * largest:.2f} %)')


def _absurd(row: Mapping[str, Any]) -> str:
  """Says which number is not finite or absurd; '' if none is."""
  for name, most in (('loss', MOST_LOSS), ('largest_weight', MOST_WEIGHT)):
    if name not in row:
      continue
    title = name.replace('_', ' ')
    if row[name] is None:
      return f'{title} not finite'
    if row[name] > most:
      return f'{title} {row[name]:.2g}'
  if row.get('num_rejected') and (row.get('train_loss', 0) is None
                                  or row.get('num_participants') == 0):
    return 'every update was broken and left out'
  return ''


def _one_class(row: Mapping[str, Any]) -> str:
  """Says so if nearly all examples get one class; else ''."""
  said = row.get('most_predicted')
  largest = _largest_class(row)
  if said is not None and largest is not None:
    if largest < 1 and 1 - said <= _FEW * (1 - largest):
      return _for_rows(f'{100 * said:.4g} %')
    return ''
  shares = _of_classes(row)
  if len(shares) > 1 and max(shares) >= 1 - _FEW and (
      sum(shares) - max(shares) <= _FEW * (len(shares) - 1)):
    return _for_rows('nearly all')
  return ''


def _for_rows(share: str) -> str:
  return f'predicts one class for {share} of the rows'


def _largest_class(row: Mapping[str, Any]) -> float | None:
  """Returns the largest class's share of the test examples.

  For an older row, which lacks it, 1 / C, which the share is at least.
  """
  if row.get('largest_class') is not None:
    return float(row['largest_class'])
  classes = row.get('per_class_accuracy')
  return 1 / len(classes) if classes else None


def _of_classes(row: Mapping[str, Any]) -> list[float]:
  return [v for v in row.get('per_class_accuracy') or [] if v is not None]


def stored(run: Mapping[str, Any]) -> list[Verdict | None]:
  """Returns the verdicts on the seeds of a run that `study.read` made.

  Older files call one class for all diverged, or say only which seeds ended
  near chance.
  """
  if 'verdict' in run:
    return [v and _renewed(Verdict(*v)) for v in run['verdict']]
  return [Verdict(GUESSES, 'not above chance') if lost else None
          for lost in run.get('diverged', ())]


def _renewed(old: Verdict) -> Verdict:
  found = re.fullmatch('one class predicted for (.*)', old.reason)
  return Verdict(ONE_CLASS, _for_rows(found[1])) if found else old


def mark(verdicts: Sequence[Verdict | None]) -> str:
  """Returns the mark of means over seeds; '' if all is well."""
  kinds = {v.kind for v in verdicts if v is not None}
  return next((m for kind, m in MARKS.items() if kind in kinds), '')


def note(verdicts: Sequence[Verdict | None]) -> str:
  """Says what is wrong with a run, for its footnote; '' if all is well.

  Args:
    verdicts: one for each seed.

  Returns:
    A text such as `† diverged in 2 of 3 seeds: loss 7.6e+10`, or
    `† predicts one class for 97 % of the rows`.
  """
  parts = []
  for kind, sign in MARKS.items():
    found = [v for v in verdicts if v is not None and v.kind == kind]
    if not found:
      continue
    reasons = list(dict.fromkeys(v.reason for v in found))
    of_them = (f' in {len(found)} of {len(verdicts)} seeds'
               if len(verdicts) > 1 else '')
    more = f', and {len(reasons) - 1} more' if len(reasons) > 1 else ''
    like = ', or a like share,' if more and kind == ONE_CLASS else ''
    parts.append(f'{sign} diverged{of_them}: {reasons[0]}{more}'
                 if kind == DIVERGED else
                 f'{sign} {reasons[0]}{like}{of_them}')
  return '; '.join(parts)


def legend(runs: Iterable[Sequence[Verdict | None]]) -> list[str]:
  """Returns a line for each meaning of a mark that is used."""
  seen = {v.kind for verdicts in runs for v in verdicts
          if v is not None and MARKS[v.kind] == mark(verdicts)}
  return [f'({sign} {SHORT[kind]})' for kind, sign in MARKS.items()
          if kind in seen]


def footnotes(runs: Iterable[tuple[str, Sequence[Verdict | None]]]
              ) -> list[str]:
  """Explains marks below a table: one line for all names with the same note."""
  return by_text((name, note(verdicts)) for name, verdicts in runs)


def marked(text: str, verdicts: Sequence[Verdict | None]) -> str:
  """Returns a number with its mark."""
  return f'{text} {mark(verdicts)}'.rstrip()
