"""Operations of a profile: how long each ran, and where it is in the model."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import re
from typing import Any, NamedTuple

# What they contain has events of its own, on any thread.
_CONTAINERS = ('while', 'conditional', 'call')
_PRODUCTS = ('dot', 'convolution', 'custom-call')
_NOISE = ('while', 'body', 'cond', 'closed_call', '')

_COMPUTATION = re.compile(r'^(?:ENTRY )?%?([\w.\-]+) \(.*\{$')
_INSTRUCTION = re.compile(
    r'^\s+(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([\w\-]+)\(')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_CALLS = re.compile(r'calls=%?([\w.\-]+)')
# A Flax module within transformations, as in transpose(jvp(ResNet9)).
_MODULE = re.compile(r'(?:\w+\()*(_?[A-Z]\w*)\)*')


class Instruction(NamedTuple):
  """One instruction of a compiled program.

  Attributes:
    opcode: of HLO.
    op_name: its metadata, the path of the JAX operation; '' if unknown.
  """

  opcode: str
  op_name: str


class Event(NamedTuple):
  """One operation that ran; times in nanoseconds."""

  name: str
  start: float
  end: float


class Item(NamedTuple):
  """All runs of an operation.

  Attributes:
    name: of the operation, or of its group.
    calls: how often it ran.
    ns: nanoseconds, without those of operations inside.
    op_name: see `Instruction`.
  """

  name: str
  calls: int
  ns: float
  op_name: str


def instructions(text: str) -> dict[str, Instruction]:
  """The instructions of compiled HLO by name.

  A fusion without metadata has those of a product inside, or else of the last
  operation inside that has any.
  """
  found: dict[str, Instruction] = {}
  inside: dict[str, list[Instruction]] = {}
  callers: list[tuple[str, str]] = []
  computation = ''
  for line in text.splitlines():
    if header := _COMPUTATION.match(line):
      computation = header[1]
    elif match := _INSTRUCTION.match(line):
      named = _OP_NAME.search(line)
      made = Instruction(match[2], named[1] if named else '')
      found[match[1]] = made
      inside.setdefault(computation, []).append(made)
      called = _CALLS.search(line)
      if called and not made.op_name:
        callers.append((match[1], called[1]))
  for name, called_name in callers:
    named_ones = [i for i in inside.get(called_name, []) if i.op_name]
    products = [i for i in named_ones if i.opcode in _PRODUCTS]
    for best in (products or named_ones)[-1:]:
      found[name] = found[name]._replace(op_name=best.op_name)
  return found


def module_name(text: str) -> str:
  """The name of a compiled program."""
  match = re.match(r'HloModule ([^,\s]+)', text)
  return match[1] if match else ''


def lines(profile: Any, module: str) -> list[list[Event]]:
  """Events of a program, a list for each line of the profile.

  Of accelerators: kernels on the streams of a GPU, or the operations of a TPU.
  Without any, those of the host's threads that say which operation they are.

  Args:
    profile: `jax.profiler.ProfileData`.
    module: name of the program; other programs are left out.

  Returns:
    The events, nested where the profile nests them.
  """
  devices, host = [], []
  for plane in profile.planes:
    if plane.name.startswith('/device:'):
      made = list(plane.lines)
      streams = [x for x in made if x.name.startswith('Stream')]
      devices += streams or [x for x in made if x.name == 'XLA Ops']
    elif plane.name.startswith('/host:'):
      host += list(plane.lines)
  found = [list(_events(line, module, on_host=False)) for line in devices]
  if not any(found):
    found = [list(_events(line, module, on_host=True)) for line in host]
  return [events for events in found if events]


def _events(line: Any, module: str, *, on_host: bool) -> Iterator[Event]:
  for event in line.events:
    stats = {name: value for name, value in event.stats
             if name in ('hlo_op', 'hlo_module')}
    theirs = str(stats.get('hlo_module', '')).partition('(')[0]
    if theirs != module and (theirs or on_host):
      continue
    if on_host and 'hlo_op' not in stats:
      continue
    name = str(stats.get('hlo_op') or event.name)
    # A TPU's events are named by the whole instruction.
    name = name.partition(' = ')[0].lstrip('%')
    yield Event(name, event.start_ns, event.start_ns + event.duration_ns)


def own_times(events: Iterable[Event]) -> Iterator[tuple[str, float]]:
  """Names and nanoseconds of events, without those of events inside."""
  open_: list[tuple[Event, list[float]]] = []
  for event in sorted(events, key=lambda e: (e.start, -e.end)):
    while open_ and open_[-1][0].end <= event.start:
      done, own = open_.pop()
      yield done.name, own[0]
    if open_:
      outer, own = open_[-1]
      own[0] -= min(event.end, outer.end) - event.start
    open_.append((event, [event.end - event.start]))
  for done, own in open_:
    yield done.name, own[0]


def items(threads: Iterable[Iterable[Event]],
          program: Mapping[str, Instruction]) -> list[Item]:
  """Operations, the longest first; loops and calls are in their contents."""
  found: dict[str, list[float]] = {}
  for events in threads:
    plain = [e for e in events if not _contains(e.name, program)]
    for name, ns in own_times(plain):
      found.setdefault(name, []).append(ns)
  unknown = Instruction('', '')
  made = [Item(name, len(ns), sum(ns), program.get(name, unknown).op_name)
          for name, ns in found.items()]
  return sorted(made, key=lambda item: -item.ns)


def _contains(name: str, program: Mapping[str, Instruction]) -> bool:
  if name in program:
    return program[name].opcode in _CONTAINERS
  return re.sub(r'[.\d]*$', '', name) in _CONTAINERS


def by_layer(found: Iterable[Item]) -> list[Item]:
  """Operations of a layer and direction together, the longest first."""
  groups: dict[str, list[Item]] = {}
  for item in found:
    groups.setdefault(layer_of(item.op_name), []).append(item)
  made = [Item(name, sum(i.calls for i in group), sum(i.ns for i in group), '')
          for name, group in groups.items()]
  return sorted(made, key=lambda item: -item.ns)


def layer_of(op_name: str) -> str:
  """Layer and direction of an operation, by the path of its metadata.

  'ResNet9/Conv_3 backward' is the layer Conv_3 in a gradient; outside of the
  network it is the operation's own name.
  """
  if not op_name:
    return 'unknown'
  path = _path(op_name)
  modules = [m[1] for part in path if (m := _MODULE.fullmatch(part))]
  if not modules:
    return f'outside: {_last(path)}'
  backward = any('transpose(' in part for part in path)
  return f'{"/".join(modules)} {"backward" if backward else "forward"}'


def place_of(op_name: str) -> str:
  """Layer, direction and operation, in short."""
  layer = layer_of(op_name)
  if layer == 'unknown' or layer.startswith('outside'):
    return layer
  return f'{layer}: {_last(_path(op_name))}'


def _path(op_name: str) -> list[str]:
  return op_name.partition(';')[0].split('/')


def _last(path: list[str]) -> str:
  """The operation, and the function that it is in, if that has a name."""
  plain = [part for part in path if part not in _NOISE]
  jitted = [part for part in plain[1:] if part.startswith('jit(')]
  return '/'.join(dict.fromkeys([*jitted[-1:], *plain[-1:]]))
