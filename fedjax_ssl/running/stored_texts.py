"""Keeps what --method and similar flags meant when a run began, and its sums.

The run stores each with all knobs, defaults included. A later start may spell a
flag differently if the knobs come out equal; it is refused if the same spelling
now means other knobs, because a default has changed.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping
import pathlib
from typing import Any, TYPE_CHECKING

from fedjax_ssl import config
from fedjax_ssl import task as task_lib
from fedjax_ssl.core import choices, run_files
from fedjax_ssl.core.registry import parse
from fedjax_ssl.training import own_code, processes
from fedjax_ssl.training import workdir as workdir_lib

if TYPE_CHECKING:
  from fedjax_ssl.running.job import Job


def of(spec: task_lib.TaskSpec, profile: str | None) -> dict[str, Any]:
  """Returns the fact `choices` of a run: its texts, and what they stand for.

  Args:
    spec: has the texts, --profile merged into the method's.
    profile: the flag.
  """
  found: dict[str, Any] = task_lib.resolved(spec)
  found['method']['profile'] = profile
  return found


def begun(job: Job) -> Job:
  """Returns the job with its facts as at the first start.

  That is how its method, model, ... were spelled, and how sums were rounded.

  Args:
    job: a `job.Job`.

  Raises:
    ValueError: if the same spelling now means different knobs.
  """
  stored = processes.once(lambda: workdir_lib.stored_config(job.folder))
  facts = stored.get('facts', {})
  if stored:
    own_code.begun(job.folder, job.facts.get('code', {}),
                   facts.get('code', {}), stored['flags'])
    job = _without_new(job, stored)
    job = job._replace(facts=workdir_lib.as_known(facts, job.facts))
  if 'code' in facts and 'code' in job.facts:
    job = job._replace(facts={**job.facts, 'code': facts['code']})
  known = facts.get('choices')
  if not known:
    return job
  try:
    return job._replace(facts=_begun_facts(job, stored['flags'], known))
  except (AttributeError, KeyError, TypeError) as error:
    raise ValueError(f'{job.folder / run_files.CONFIG} is damaged: its '
                     f'`choices` entry is malformed ({error!r}).') from error


def _without_new(job: Job, stored: Mapping[str, Any]) -> Any:
  """Returns the job without options that the run's version did not know.

  Their defaults do what that version did. An option with another value stays,
  and is refused as any flag that differs.
  """
  new = {name for name, option in config.OPTIONS.items()
         if name not in stored['flags']
         and job.config.get(name) == option.default}
  task = job.facts['task']
  facts = {**job.facts, 'task': {**task, 'spec': _but(new, task['spec'])},
           'choices': _but(new, job.facts['choices'])}
  return job._replace(facts=facts, new=frozenset(new))


def _but(names: Collection[str], values: Mapping[str, Any]) -> dict[str, Any]:
  return {k: v for k, v in values.items() if k not in names}


def _begun_facts(job: Job, stored: Mapping[str, Any],
                 known: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the facts of a job, with the texts of its first start."""
  facts = {**job.facts, 'choices': dict(job.facts['choices'])}
  for field, now in job.facts['choices'].items():
    was = known.get(field, now)
    if not own_code.same_name(parse(now['text'])[0], parse(was['text'])[0]):
      continue  # Refused as any other flag that differs.
    if not choices.changed(was['knobs'], now['knobs']):
      facts['choices'][field] = was
    elif now['text'] in (was['text'], stored.get(field)):
      raise ValueError(_other_default(job.folder, field, now, was))
  task = facts['task']
  texts = {k: text for k, text in first(facts).items() if k != 'profile'}
  facts['task'] = {**task, 'spec': {**task['spec'], **texts}}
  return facts


def _other_default(folder: pathlib.Path, field: str, now: Mapping[str, Any],
                   was: Mapping[str, Any]) -> str:
  """One line: what a text stood for, stands for, and how to go on."""
  differs = choices.changed(was['knobs'], now['knobs'])
  text = task_lib.restated(field, now['text'], was['knobs'])
  return (f'{folder} began when --{field}={now["text"]} stood for '
          f'{choices.listed(differs, 0)}; today it stands for '
          f'{choices.listed(differs, 1)}. Go on with --{field}="{text}".')


def first(facts: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the flags that hold texts, as they were at the first start."""
  chosen = facts['choices']
  return {**{field: chosen[field]['text'] for field in chosen},
          'profile': chosen['method']['profile']}


def may_differ(job: Job) -> tuple[str, ...]:
  """Returns the flags that may differ from those in a job's folder.

  Args:
    job: what `begun` returned.
  """
  stored = workdir_lib.stored_config(job.folder)
  known = stored.get('facts', {}).get('choices', {})
  same = [field for field, chosen in job.facts['choices'].items()
          if known.get(field) == chosen]
  return (*config.MAY_CHANGE, *same, *(['profile'] if 'method' in same else []))
