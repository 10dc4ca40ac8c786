"""Federated semi-supervised learning, simulated in JAX.

Names are imported when they are first used: `import fedjax_ssl`, or
`from fedjax_ssl import aggregation` alone, does not load the network,
checkpoint, data set and plotting libraries.
"""
from __future__ import annotations

import importlib

# Type checkers take this name for `typing`'s. To load that module takes a
# while, in which a program would not listen to signals yet.
TYPE_CHECKING = False
if TYPE_CHECKING:  # The same names, for editors and type checkers.
  from fedjax_ssl import (
    aggregation,
    bench,
    cli,
    config,
    core,
    data,
    finished,
    fitting,
    losses,
    methods,
    models,
    ops,
    papers,
    privacy,
    report,
    running,
    sparse,
    task,
    testing,
    training,
  )
  from fedjax_ssl.core.local_training import Aux, Given
  from fedjax_ssl.core.rounds import chain, client_pass, server_pass
  from fedjax_ssl.core.types import (
    Batch,
    Client,
    Cohort,
    Context,
    Examples,
    Federation,
    Method,
    Model,
    Shard,
    State,
    Task,
    Update,
    Variables,
  )
  from fedjax_ssl.finished import load
  from fedjax_ssl.fitting.run import Run
  from fedjax_ssl.fitting.start import fit
  from fedjax_ssl.methods import make as make_method
  from fedjax_ssl.methods import METHODS
  from fedjax_ssl.models import make as make_model
  from fedjax_ssl.models import MODELS
  from fedjax_ssl.report.pairs import compare
  from fedjax_ssl.running.settings import register as register_setting
  from fedjax_ssl.task import make_task, TaskSpec
  from fedjax_ssl.training.loop import Observer, train
  from fedjax_ssl.training.runner import Row

__version__ = '0.1.0'

_MODULES = (
    'aggregation', 'bench', 'cli', 'config', 'core', 'data', 'finished',
    'fitting', 'losses', 'methods', 'models', 'ops', 'papers', 'privacy',
    'report', 'running', 'sparse', 'task', 'testing', 'training')

# Public name to its module and its name there.
_NAMES = {
    'Aux': ('core.local_training', 'Aux'),
    'Batch': ('core.types', 'Batch'),
    'Client': ('core.types', 'Client'),
    'Cohort': ('core.types', 'Cohort'),
    'Context': ('core.types', 'Context'),
    'Examples': ('core.types', 'Examples'),
    'Federation': ('core.types', 'Federation'),
    'Given': ('core.local_training', 'Given'),
    'METHODS': ('methods', 'METHODS'),
    'MODELS': ('models', 'MODELS'),
    'Method': ('core.types', 'Method'),
    'Model': ('core.types', 'Model'),
    'Observer': ('training.loop', 'Observer'),
    'Row': ('training.runner', 'Row'),
    'Run': ('fitting.run', 'Run'),
    'Shard': ('core.types', 'Shard'),
    'State': ('core.types', 'State'),
    'Task': ('core.types', 'Task'),
    'TaskSpec': ('task', 'TaskSpec'),
    'Update': ('core.types', 'Update'),
    'Variables': ('core.types', 'Variables'),
    'chain': ('core.rounds', 'chain'),
    'client_pass': ('core.rounds', 'client_pass'),
    'compare': ('report.pairs', 'compare'),
    'fit': ('fitting.start', 'fit'),
    'load': ('finished', 'load'),
    'make_method': ('methods', 'make'),
    'make_model': ('models', 'make'),
    'make_task': ('task', 'make_task'),
    'register_setting': ('running.settings', 'register'),
    'server_pass': ('core.rounds', 'server_pass'),
    'train': ('training.loop', 'train'),
}

__all__ = [
    'Aux', 'Batch', 'Client', 'Cohort', 'Context', 'Examples', 'Federation',
    'Given', 'METHODS', 'MODELS', 'Method', 'Model', 'Observer', 'Row', 'Run',
    'Shard', 'State', 'Task', 'TaskSpec', 'Update', 'Variables', 'aggregation',
    'bench', 'chain', 'cli', 'client_pass', 'compare', 'config', 'core', 'data',
    'finished', 'fit', 'fitting', 'load', 'losses', 'make_method', 'make_model',
    'make_task', 'methods', 'models', 'ops', 'papers', 'privacy',
    'register_setting', 'report', 'running', 'server_pass', 'sparse', 'task',
    'testing', 'train', 'training']


def __getattr__(name: str) -> object:
  """Imports the module behind a public name, once."""
  if name in _MODULES:
    return importlib.import_module(f'{__name__}.{name}')
  if name not in _NAMES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  module, attribute = _NAMES[name]
  value = getattr(importlib.import_module(f'{__name__}.{module}'), attribute)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*__all__, *(n for n in globals() if n.startswith('__'))})
