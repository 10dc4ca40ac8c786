"""Every stored result says where it is from, and none is large."""
from __future__ import annotations

import ast
import re

import pytest

from tests.oracles import ours

NAMES = sorted(path.stem for path in ours.FOLDER.glob('*.npz'))


@pytest.mark.parametrize('name', NAMES)
def test_a_result_has_its_script_its_commit_and_its_test(name):
  assert (ours.FOLDER / f'{name}.npz').stat().st_size < 20_000
  assert (ours.FOLDER / f'{name}_test.py').exists()
  script = ast.parse((ours.FOLDER / f'make_{name}.py').read_text('utf-8'))
  told = re.search(r'\b[\w-]+/[\w-]+\s+at ([0-9a-f]{40})\b',
                   ast.get_docstring(script) or '')
  assert told and told.group(1) == str(ours.stored(name)['commit'])


def test_every_script_has_its_result():
  scripts = {path.stem.removeprefix('make_')
             for path in ours.FOLDER.glob('make_*.py')}
  assert scripts == set(NAMES)
