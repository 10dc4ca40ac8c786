"""How charts look, and how they become files: one place for all of them."""
from __future__ import annotations

import io
import os
import pathlib
from typing import Any

from fedjax_ssl.core import disk

# Okabe and Ito's colours: told apart by colour-blind readers and in print.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#56B4E9', '#E69F00',
           '#000000')
ENDINGS = '.png', '.pdf', '.svg'
_DASHES: tuple[Any, ...] = ('-', (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1, 1, 1)))


def look(number: int, dash: int = 0) -> tuple[str, int]:
  """Returns a colour and which of four dashes; after the last colour the next.

  Args:
    number: of the line, from 0.
    dash: which of the dashes the first lines have, from 0.
  """
  turn, place = divmod(number, len(COLOURS))
  return COLOURS[place], (dash + turn) % len(_DASHES)


def line(number: int, dash: int = 0) -> dict[str, Any]:
  """Returns `look` in the words of matplotlib's lines."""
  colour, dash = look(number, dash)
  return {'color': colour, 'linestyle': _DASHES[dash]}


def ground(axes: Any) -> None:
  """Gives axes a faint grid and no frame above and to the right."""
  axes.grid(color='#dddddd', linewidth=0.6)
  axes.set_axisbelow(True)
  axes.spines[['top', 'right']].set_visible(False)


def as_they_are(chart: Any) -> None:
  """Makes legends show names as plain text, in which `$` begins no formula."""
  for legend in chart.legends:
    for text in legend.get_texts():
      text.set_parse_math(False)


def write(chart: Any, path: str | os.PathLike[str]) -> None:
  """Writes a figure of matplotlib whole, or leaves the older file.

  Args:
    chart: the figure.
    path: of the file; its ending, one of `ENDINGS`, chooses the format. Folders
      that it needs are made.

  Raises:
    ValueError: if the ending is another, or the file cannot be written.
    TypeError: for anything but a path.
  """
  file, drawn = pathlib.Path(path), io.BytesIO()
  if file.suffix.lower() not in ENDINGS:
    raise ValueError(f'{os.fspath(path)!r} must end with '
                     f'{", ".join(ENDINGS[:-1])} or {ENDINGS[-1]}.')
  chart.savefig(drawn, dpi=150, format=file.suffix[1:].lower())
  with disk.writing(path):
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.is_file() or file.read_bytes() != drawn.getvalue():
      disk.replace(file, drawn.getvalue())
