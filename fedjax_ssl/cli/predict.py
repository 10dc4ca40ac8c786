"""Tells the classes of images, texts or arrays by the model of a run.

fedjax-ssl predict runs/a photos more/x.jpg --out=classes.csv
fedjax-ssl predict model.npz texts.csv --seed=1

RUN is the folder of a run, or a file that `save` wrote. INPUT is what the run
was trained on:

  images: a file, or a folder, for all images below it, in the order of their
    names; they are brought to the model's size as `resize-images` does
  texts: a .csv with a column `text`, or a .txt with one text a line, where
    blank lines are passed over
  arrays: an .npy, or an .npz with an array `x` or one array only, as `predict`
    takes them in Python: images, tokens of texts, or vectors of these

Prints CSV with a line for each input, in order: `input,class,probability`.
The input is the file; of texts FILE:LINE, the line it begins at, counted from 1
as editors do; of arrays FILE:INDEX, counted from 0. The class goes by its name,
if the data had names, else by its number. If any input is wrong, nothing is
printed or written. Flags stand before RUN or after the last INPUT; after `--`
nothing is a flag.
"""
from __future__ import annotations

import argparse
from collections.abc import Sequence
import os
import pathlib

from fedjax_ssl.cli import arguments
from fedjax_ssl.core import disk
from fedjax_ssl.report import printing, text

_HEADER = 'input', 'class', 'probability'


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
  parser = arguments.Parser('predict', __doc__)
  parser.add_argument('run', metavar='RUN',
                      help='folder of a run, or a file that `save` wrote')
  parser.add_argument('inputs', metavar='INPUT', nargs='+',
                      help='file, or folder of images')
  parser.add_argument('--out', type=pathlib.Path,
                      help='the .csv to write; default: it is printed')
  parser.add_argument('--seed', type=int,
                      help="which of the run's seeds; default: the first")
  found = parser.parse_args(argv)
  if found.out:
    parser.check_out(found.out, '.csv')
    if any(_is_same(found.out, given) for given in found.inputs):
      parser.error(f'--out={found.out} is an INPUT')
  return found


def _is_same(out: pathlib.Path, given: str) -> bool:
  return out.exists() and os.path.exists(given) and out.samefile(given)


@arguments.refusing
def main(argv: Sequence[str]) -> int:
  """Predicts all inputs, then prints or writes; returns the exit code."""
  asked = _arguments(argv)
  from fedjax_ssl.cli import predicting  # Loads JAX.
  rows = predicting.rows(asked.run, asked.inputs, asked.seed)
  csv = text.as_csv([_HEADER, *rows])
  if asked.out is None:
    printing.say(csv, end='')
  else:
    disk.replace(asked.out, text.plain(csv).encode())
    printing.say(f'{asked.out}: {len(rows)} row{"s" * (len(rows) != 1)}')
  return 0
