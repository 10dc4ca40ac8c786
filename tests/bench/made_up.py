"""A stored table that no run has made."""
from __future__ import annotations

import json
from typing import Any

import numpy as np

from fedjax_ssl.bench import plan, records, standing

BED = plan.beds()['clients']
COUNT = 3  # Of configurations.
CHANGED = ('--dataset=digits',)


def table() -> dict[str, Any]:
  """The table of one row, `fixmatch`."""
  entry = plan.entries()['fixmatch']
  lines = {skew: standing.compare([standing.Measured(
      entry, plan.configurations(entry, BED, COUNT)[0], np.ones(3), (4,),
      np.ones((3, 1)), np.ones(3), None, None, None, None, ())])
           for skew in BED.skews}
  return json.loads(records.written(BED, lines, {'fixmatch': records.Record(
      plan.space(entry, BED), dict.fromkeys(range(COUNT), .5),
      {skew: line.measured for skew, (line,) in lines.items()},
      dict.fromkeys(lines, {}))}, COUNT, CHANGED))
