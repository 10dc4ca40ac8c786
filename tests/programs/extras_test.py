"""What is missing is installed from this repository, not from an index."""
from __future__ import annotations

import re

from fedjax_ssl.training import trackers

HINT = re.compile(r"pip install(?: -e '\.\[(\w+|{name})\]')?")


def test_every_hint_names_an_extra_of_this_repository(root):
  extras = re.findall(r"^    '(\w+)': ", (root / 'setup.py').read_text(), re.M)
  hints = [
      (str(file), name) for folder in ('fedjax_ssl', 'experiments')
      for file in (root / folder).rglob('*.py')
      for match in HINT.finditer(file.read_text())
      for name in (trackers.PACKAGES if match[1] == '{name}' else [match[1]])]
  assert len(hints) > 5 and 'privacy' in extras
  assert not [hint for hint in hints if hint[1] not in extras]
