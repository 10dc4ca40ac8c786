"""Marks cases that `make test` leaves out; see pyproject.toml."""
from __future__ import annotations

from typing import Any

import pytest


def wider(*cases: Any) -> list[Any]:
  """More samples of a law that the cases beside them hold by default.

  A case of several arguments is a tuple, as for `pytest.mark.parametrize`.
  """
  return [pytest.param(*(case if isinstance(case, tuple) else (case,)),
                       marks=pytest.mark.thorough) for case in cases]
