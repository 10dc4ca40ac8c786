"""Checks what the documents promise about the files around them.

Run by `make lint`. Pages stay short, links lead somewhere, and what a reader
looks up (extras, methods, metrics, settings) is named on its page.
"""
from __future__ import annotations

from collections.abc import Iterator
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

# Bytes.
_LIMITS = {'README.md': 8192, 'BUILD.md': 8192, 'experiments/README.md': 20480}
_PICTURE = 60 * 1024  # Bytes of a picture that a README shows.
_LINES = 500  # Of a source file.
_LINK = re.compile(r'!?\[[^\]]*\]\(([^)\s]+)\)')


def tracked(ending: str) -> list[pathlib.Path]:
  """Files of the checkout with such a name."""
  names = subprocess.run(
      ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard',
       f'*{ending}'], cwd=ROOT, capture_output=True, text=True,
      check=True).stdout.split('\0')
  return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def anchors(text: str) -> set[str]:
  """The names by which headings can be linked to."""
  return {re.sub(r'[^\w\- ]', '', line.lstrip('#').strip().lower()
                 ).replace(' ', '-')
          for line in text.splitlines() if line.startswith('#')}


def faults_of_page(page: pathlib.Path) -> Iterator[str]:
  """Links that lead nowhere, and a page or picture that is too large."""
  name = page.relative_to(ROOT).as_posix()
  text = page.read_text('utf-8')
  size = len(text.encode())
  if size > _LIMITS.get(name, size):
    yield f'{name} has {size} bytes; at most {_LIMITS[name]} are allowed'
  for link in _LINK.findall(text):
    if link.startswith(('http:', 'https:', 'mailto:')):
      continue
    path, _, anchor = link.partition('#')
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
      yield f'{name} links to {link}, which is not there'
    elif anchor and anchor not in anchors(target.read_text('utf-8')):
      yield f'{name} links to {link}, which has no such heading'
    elif name == 'README.md' and target.suffix in ('.png', '.svg'):
      if target.stat().st_size > _PICTURE:
        yield f'{link} is larger than {_PICTURE} bytes'


def unnamed() -> Iterator[str]:
  """What a page should name and does not."""
  from fedjax_ssl import methods
  import setup
  looked_up = {
      'BUILD.md': [f'[{name}]' for name in setup.EXTRAS],
      'experiments/README.md': [
          *methods.METHODS,
          *(p.stem for p in (ROOT / 'experiments').glob('*_*iid*.py')),
          'digits_dirdir', 'cross_device', 'metrics.jsonl', 'config.json']}
  for page, names in looked_up.items():
    text = (ROOT / page).read_text('utf-8')
    for name in names:
      if f'`{name}`' not in text:
        yield f'{page} does not name `{name}`'


def main() -> int:
  """Prints each fault; returns an exit code."""
  faults = [line for page in tracked('.md') for line in faults_of_page(page)]
  faults += unnamed()
  for file in tracked('.py'):
    count = len(file.read_text('utf-8').splitlines())
    if count > _LINES:
      faults.append(f'{file.relative_to(ROOT)} has {count} lines: a noun is '
                    f'missing (at most {_LINES})')
  for line in faults:
    print(line, file=sys.stderr)
  return 1 if faults else 0


if __name__ == '__main__':
  sys.exit(main())
