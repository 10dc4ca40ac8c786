"""What tests of reports share."""
from __future__ import annotations

import pytest


@pytest.fixture
def undrawn(monkeypatch):
  """Reports without the files of their charts, which take most of the time."""
  from fedjax_ssl.report import charts, interactive
  made = {'svg': b'', 'pdf': b''}
  monkeypatch.setattr(charts, 'files', lambda *unused: made)
  monkeypatch.setattr(charts, 'inline', lambda *unused: [])
  monkeypatch.setattr(charts, 'of_heat_map', lambda *unused: ('', made))
  monkeypatch.setattr(interactive, 'library', lambda: '')
