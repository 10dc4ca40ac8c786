"""Words name runs, folders of runs, and folders of both."""
from __future__ import annotations

import pathlib

from fedjax_ssl.cli import places
from fedjax_ssl.core import bounds, run_files


def test_runs_are_found_in_folders_and_in_the_folders_there(tmp_path):
  def run(*parts: str) -> str:
    folder = pathlib.Path(tmp_path, *parts)
    folder.mkdir(parents=True)
    (folder / run_files.CONFIG).write_text('{}')
    return str(folder)

  runs = [run('study', 'a'), run('study', 'b'), run('study_2')]
  run('study', 'a', bounds.FOLDERS[0])
  (tmp_path / 'study' / 'a.log').touch()
  (tmp_path / 'empty').mkdir()
  study, all_, empty = (
      str(tmp_path / 'study'), str(tmp_path), str(tmp_path / 'empty'))
  assert places.runs_in([runs[1]]) == runs[1:2]
  assert places.runs_in([study]) == runs[:2]
  assert places.runs_in([all_]) == runs
  assert places.runs_in([runs[1], study, empty]) == [runs[1], runs[0]]
  assert places.runs_in([empty]) == [empty]
