"""What is missing is installed from this repository, not from an index."""
from __future__ import annotations

import re

HINT = re.compile(r"pip install(?: -e '\.\[(\w+)\]')?")


def test_every_hint_names_an_extra_of_this_repository(root):
  extras = re.findall(r"^    '(\w+)': ", (root / 'setup.py').read_text(), re.M)
  hints = [
      (str(file), match[1]) for folder in ('fedjax_ssl', 'experiments')
      for file in (root / folder).rglob('*.py')
      for match in HINT.finditer(file.read_text())]
  assert len(hints) > 5 and 'privacy' in extras
  assert not [hint for hint in hints if hint[1] not in extras]
