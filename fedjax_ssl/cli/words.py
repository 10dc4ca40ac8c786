"""What the texts of a run stood for at its first start: --method and its like.

A run stores them with all knobs, defaults included. At a later start a text may
be another one that stands for the same. One that stands for something else
today, because a default has changed, is refused.
"""
from __future__ import annotations

from collections.abc import Mapping
import pathlib
from typing import Any

from fedjax_ssl import config
from fedjax_ssl import task as task_lib
from fedjax_ssl.core import choices
from fedjax_ssl.core.registry import parse
from fedjax_ssl.training import processes
from fedjax_ssl.training import workdir as workdir_lib


def of(spec: task_lib.TaskSpec, profile: str | None) -> dict[str, Any]:
  """Returns the fact `choices` of a run: its texts, and what they stand for.

  Args:
    spec: has the texts, --profile merged into the method's.
    profile: the flag.
  """
  found: dict[str, Any] = task_lib.resolved(spec)
  found['method']['profile'] = profile
  return found


def begun(job: Any) -> Any:
  """Returns the job in the words with which its folder's run began.

  Args:
    job: a `job.Job`.

  Raises:
    ValueError: if a text is the run's, but stands for something else today.
  """
  stored = processes.once(lambda: _stored(job.folder))
  known = stored.get('facts', {}).get('choices')
  if not known:
    return job
  try:
    return job._replace(facts=_begun_facts(job, stored['flags'], known))
  except (AttributeError, KeyError, TypeError) as error:
    raise ValueError(f'{job.folder / workdir_lib.CONFIG} is damaged: its '
                     f'choices are none ({error!r}).') from error


def _begun_facts(job: Any, stored: Mapping[str, Any],
                 known: Mapping[str, Any]) -> dict[str, Any]:
  """The facts of a job, with the texts that are known of its first start."""
  facts = {**job.facts, 'choices': dict(job.facts['choices'])}
  for field, now in job.facts['choices'].items():
    was = known.get(field, now)
    if parse(now['text'])[0] != parse(was['text'])[0]:
      continue  # Refused as any other flag that differs.
    if not choices.changed(was['knobs'], now['knobs']):
      facts['choices'][field] = was
    elif now['text'] in (was['text'], stored.get(field)):
      raise ValueError(_other_default(job.folder, field, now, was))
  task = facts['task']
  texts = {k: text for k, text in first(facts).items() if k != 'profile'}
  facts['task'] = {**task, 'spec': {**task['spec'], **texts}}
  return facts


def _stored(folder: pathlib.Path) -> dict[str, Any]:
  """The configuration of a folder; {} if it holds no run yet."""
  if not (folder / workdir_lib.CONFIG).exists():
    return {}
  return workdir_lib.read_config(folder)


def _other_default(folder: pathlib.Path, field: str, now: Mapping[str, Any],
                   was: Mapping[str, Any]) -> str:
  """One line: what a text stood for, stands for, and how to go on."""
  differs = choices.changed(was['knobs'], now['knobs'])
  text = task_lib.renewed(field, now['text'], was['knobs'])
  return (f'{folder} began when --{field}={now["text"]} stood for '
          f'{choices.listed(differs, 0)}; today it stands for '
          f'{choices.listed(differs, 1)}. Go on with --{field}="{text}".')


def first(facts: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the flags that hold texts, as they were at the first start."""
  chosen = facts['choices']
  return {**{field: chosen[field]['text'] for field in chosen},
          'profile': chosen['method']['profile']}


def as_before(flags: Mapping[str, Any]) -> list[str]:
  """Returns the flags that do as before there were such flags."""
  return [name for name in config.LATER
          if flags[name] == config.OPTIONS[name].default]


def may_differ(job: Any) -> tuple[str, ...]:
  """Returns the flags that need not be as in the folder of a job.

  Args:
    job: what `begun` returned.
  """
  stored = _stored(job.folder)
  known = stored.get('facts', {}).get('choices', {})
  new = [name for name in as_before(job.config)
         if name not in stored.get('flags', {})]
  same = [field for field, chosen in job.facts['choices'].items()
          if known.get(field) == chosen]
  return (*config.FREE, *new, *same, *(['profile'] if 'method' in same else []))
