"""A fixture of tests of whole runs, for modules that import its name."""
from __future__ import annotations

import jax
import pytest

from fedjax_ssl.training import runner
from tests import toy


@pytest.fixture(autouse=True)
def quick_keys(monkeypatch: pytest.MonkeyPatch) -> None:
  """Keys whose draws are quick to compile."""
  monkeypatch.setattr(runner, 'root_keys', lambda seed: tuple(
      jax.random.split(toy.key(seed))))
