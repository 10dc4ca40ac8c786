"""Finds the knob that an option which nobody knows is, or resembles."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import contextlib
from typing import Any, NamedTuple

from fedjax_ssl import task
from fedjax_ssl.core import checks, knobs, registry
from fedjax_ssl.running import other_names


class Meant(NamedTuple):
  """A knob that an unknown option is, or resembles.

  Attributes:
    field: the option that is given with it.
    name: of the method, model or the like that has it.
    knob: its name there.
    off: whether the option has a `no` before it.
    given: knobs that the name has been given.
    owners: methods that have it, if nothing that is chosen does.
    is_near: whether the option only resembles it.
  """

  field: str
  name: str
  knob: str
  off: bool
  given: Mapping[str, Any]
  owners: Sequence[str] = ()
  is_near: bool = False

  @property
  def is_chosen(self) -> bool:
    """Returns whether it is one of what is chosen, by its whole name."""
    return not self.owners and not self.is_near

  @property
  def default(self) -> Any:
    """Returns the knob's default."""
    return knobs.names(registry.find(
        task.REGISTRIES[self.field], self.name))[self.knob].default

  def told(self, value: str, method: str,
           option: Callable[[str, str], str]) -> str:
    """Says how to give it, after words such as 'x is no flag'.

    Args:
      value: as Python writes it.
      method: the chosen one.
      option: writes an option and its value as the reader gives them.
    """
    words = [*(f'{k}={registry.literal(v)}' for k, v in self.given.items()
               if k != self.knob), f'{self.knob}={value}']
    text = option(self.field, f'{self.name}({", ".join(words)})')
    if self.is_near:
      return f'. Did you mean the knob {text}?'
    if self.owners:
      return (f' but a knob of {", ".join(self.owners)}, and '
              f'{option("method", method)} has none; it is given as in {text}.')
    return f' but a knob: give {text}.'


def find(word: str, chosen: Mapping[str, Any]) -> Meant | None:
  """Finds the knob that a word means; noNAME may mean the knob NAME.

  Those of what is chosen come first, then those of other methods, then those
  of what is chosen under a name that is nearly the same.

  Args:
    word: the unknown option, without dashes.
    chosen: by field, the texts that name methods, networks and the like; those
      that are no texts, or name nothing, are passed over. Without a method
      nothing is said of other methods.
  """
  word = other_names.knob(word)
  asked = [word, *([word.removeprefix('no')] if word.startswith('no') else [])]
  held: dict[str, tuple[str, str, Mapping[str, Any]]] = {}
  found: set[str] = set()
  for field, known in task.REGISTRIES.items():
    if isinstance(text := chosen.get(field), str):
      with contextlib.suppress(ValueError):
        name, given = registry.parse(text)
        for knob in knobs.names(registry.find(known, name, field)):
          held.setdefault(knob, (field, name, given))
        found.add(field)
  for knob in asked:
    if knob in held:
      field, name, old = held[knob]
      return Meant(field, name, knob, knob != word, old)
  for knob in asked if 'method' in found else ():
    if owners := [name for name, build in task.REGISTRIES['method'].items()
                  if knob in knobs.names(build)]:
      return Meant('method', owners[0], knob, knob != word, {}, owners)
  for one in reversed(asked):
    for knob in checks.nearest(one, held, other_names.NEAR):
      field, name, old = held[knob]
      return Meant(field, name, knob, checks.nearest(knob, asked, 0) != [word],
                   old, is_near=True)
  return None
