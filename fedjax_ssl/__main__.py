"""python -m fedjax_ssl: lists what there is to choose from."""
from __future__ import annotations

import argparse
from collections.abc import Sequence
import json
import sys

from fedjax_ssl import catalog


def main(argv: Sequence[str]) -> int:
  """Prints the catalog, or a part of it; returns the exit code."""
  groups = catalog.catalog()
  parser = argparse.ArgumentParser(
      prog='python -m fedjax_ssl', description='Lists methods, models, data '
      'sets, partitions, labels, streams and views, their options, defaults '
      'and sources.')
  parser.add_argument('group', nargs='?', choices=sorted(groups),
                      help='one kind only')
  parser.add_argument('name', nargs='?', help='one entry only')
  parser.add_argument('--json', action='store_true', help='for programs')
  args = parser.parse_args(argv)
  if args.group:
    groups = {args.group: groups[args.group]}
  if args.name:
    group = groups[args.group]
    kept = tuple(e for e in group.entries if e.name == args.name)
    if not kept:
      names = ', '.join(e.name for e in group.entries)
      print(f'error: {args.group} has no {args.name!r}. There are: {names}.',
            file=sys.stderr)
      return 2
    groups = {args.group: group._replace(entries=kept)}
  if args.json:
    print(json.dumps({
        name: [{**entry._asdict(),
                'options': [o._asdict() for o in entry.options]}
               for entry in group.entries]
        for name, group in groups.items()}, indent=1))
  else:
    print('\n'.join(catalog.show(*item) for item in groups.items()), end='')
  return 0


if __name__ == '__main__':
  try:
    sys.exit(main(sys.argv[1:]))
  except BrokenPipeError:  # As in `python -m fedjax_ssl | head`.
    sys.stderr.close()
