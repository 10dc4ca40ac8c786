"""What the scripts that ask the authors' code share.

They run in an environment of their own, with PyTorch or TensorFlow and without
JAX, so nothing here imports the library. Nothing of the authors is copied: it
is imported from a checkout that the user names, or a function's source is taken
out of it when the script runs.
"""
from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable
import importlib
import importlib.machinery
import pathlib
import subprocess
import sys
import types
from typing import Any

import numpy as np


def arguments(doc: str | None, repository: str, commit: str
              ) -> tuple[pathlib.Path, pathlib.Path]:
  """Reads --checkout and --out.

  Args:
    doc: the script's docstring.
    repository: the authors', as owner/name.
    commit: that the stored results were made with. A checkout that has another
      is refused; one without a .git, as of an archive, cannot be asked.

  Returns:
    Both paths.
  """
  parser = argparse.ArgumentParser(
      description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--checkout', type=pathlib.Path, required=True,
                      help=f'folder with {repository} at {commit}')
  parser.add_argument('--out', type=pathlib.Path, required=True,
                      help='npz file to write')
  given = parser.parse_args()
  if not given.checkout.is_dir():
    parser.error(f'--checkout={given.checkout} is no folder')
  if (given.checkout / '.git').exists():
    head = subprocess.run(
        ['git', '-C', str(given.checkout), 'rev-parse', 'HEAD'],
        capture_output=True, text=True, check=True).stdout.strip()
    if head != commit:
      parser.error(f'--checkout={given.checkout} is at {head}; needed is '
                   f'{commit} of {repository}')
  return given.checkout.resolve(), given.out


class _Anything(types.ModuleType):
  """A module that has every name; what it gives does nothing."""

  __path__: list[str] = []
  __all__: list[str] = []

  def __getattr__(self, name: str) -> Any:
    if name.startswith('__'):
      raise AttributeError(name)
    return type(name, (), {'__init__': lambda self, *args, **kwargs: None})


def pretend(*names: str) -> None:
  """Lets modules be imported that are not installed and do not matter."""
  for name in names:
    sys.modules[name] = module = _Anything(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    package, _, child = name.rpartition('.')
    if isinstance(sys.modules.get(package), _Anything):
      setattr(sys.modules[package], child, module)


def load(checkout: pathlib.Path, name: str) -> Any:
  """Imports one of the checkout's modules by its dotted name."""
  if str(checkout) not in sys.path:
    sys.path.insert(0, str(checkout))
  return importlib.import_module(name)


def taken(path: pathlib.Path, names: Iterable[str], **given: Any
          ) -> types.SimpleNamespace:
  """Runs some functions and classes of a file that cannot be imported whole.

  Args:
    path: the file.
    names: what to take, at its top level.
    **given: the names that these use.

  Returns:
    What was taken; its functions see each other and `given`.
  """
  wanted = set(names)
  body = [node for node in ast.parse(path.read_text('utf-8')).body
          if isinstance(node, ast.FunctionDef | ast.ClassDef)
          and node.name in wanted]
  missing = wanted - {node.name for node in body}
  if missing:
    raise LookupError(f'{path} has no {", ".join(sorted(missing))}')
  space = dict(given)
  exec(compile(ast.Module(list(body), []), str(path), 'exec'), space)
  return types.SimpleNamespace(**space)


def lines(program: pathlib.Path, first: str, last: str) -> Any:
  """Compiles some lines of a program, wherever in it they are.

  Args:
    program: the file.
    first: the statement that they begin with, as `ast.unparse` writes it; of
      one with a body, the line before the body.
    last: the one that they end with.

  Returns:
    Code for `exec`.
  """
  for node in ast.walk(ast.parse(program.read_text('utf-8'))):
    body: Any = getattr(node, 'body', None)
    texts = [ast.unparse(x).partition('\n')[0] for x in body] if (
        isinstance(body, list)) else []
    if first in texts and last in texts[texts.index(first):]:
      begin = texts.index(first)
      end = texts.index(last, begin) + 1
      return compile(ast.Module(body[begin:end], []), str(program), 'exec')
  raise LookupError(f'{program} has no lines from {first!r} to {last!r}')


def without_cuda(torch: Any) -> None:
  """Keeps on the processor what the authors send to a GPU."""
  class Event:

    def __init__(self, **kwargs: Any) -> None:
      del kwargs

    def record(self) -> None:
      pass

    def elapsed_time(self, other: Event) -> float:
      del other
      return 0.0

  def stays(self: Any, *args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    return self

  torch.Tensor.cuda = torch.nn.Module.cuda = stays
  torch.cuda.Event = Event
  torch.cuda.synchronize = lambda *args: None


def perceptron(torch: Any, weights: dict[str, Any]) -> Any:
  """Two dense layers with a tanh between them, as `ours.perceptron`.

  Args:
    torch: the module.
    weights: w0 [d, h], b0 [h], w1 [h, C], b1 [C].
  """
  width, hidden = weights['w0'].shape
  net = torch.nn.Sequential(
      torch.nn.Linear(width, hidden), torch.nn.Tanh(),
      torch.nn.Linear(hidden, weights['w1'].shape[1]))
  with torch.no_grad():
    for layer, i in ((net[0], 0), (net[2], 1)):
      layer.weight.copy_(torch.tensor(weights[f'w{i}'].T))
      layer.bias.copy_(torch.tensor(weights[f'b{i}']))
  return net


def weights_of(net: Any, prefix: str = '') -> dict[str, np.ndarray]:
  """What `perceptron` was made of, as it is now."""
  return {
      f'{prefix}{letter}{i}': value.detach().numpy().T.copy()
      for i, layer in enumerate((net[0], net[2]))
      for letter, value in (('w', layer.weight), ('b', layer.bias))}


def draw_weights(rng: np.random.Generator, width: int, hidden: int,
                 num_classes: int, scale: float = 1.0) -> dict[str, np.ndarray]:
  """Draws what `perceptron` is made of."""
  return {'w0': rng.normal(size=(width, hidden)) * scale,
          'b0': rng.normal(size=hidden) * 0.1,
          'w1': rng.normal(size=(hidden, num_classes)) * scale,
          'b1': rng.normal(size=num_classes) * 0.1}


def normalized(torch: Any, weights: dict[str, Any]) -> Any:
  """As `perceptron`, with a batch norm before the tanh.

  Args:
    torch: the module.
    weights: those of `draw_normalized`.

  Returns:
    A network of features, what its layer `classifier` reads, and logits.
  """
  class Net(torch.nn.Module):

    def __init__(self) -> None:
      super().__init__()
      width, hidden = weights['w0'].shape
      self.first = torch.nn.Linear(width, hidden)
      self.norm = torch.nn.BatchNorm2d(hidden)
      self.classifier = torch.nn.Linear(hidden, weights['w1'].shape[1])

    def forward(self, x: Any) -> Any:
      features = torch.tanh(self.norm(self.first(x)[..., None, None]))
      return features.flatten(1), self.classifier(features.flatten(1))

  net = Net()
  with torch.no_grad():
    for name, place in _places(net).items():
      place.copy_(torch.tensor(weights[name].T))
  return net


def _places(net: Any) -> dict[str, Any]:
  """The tensors of `normalized` by the names of `draw_normalized`."""
  return {'w0': net.first.weight, 'b0': net.first.bias,
          'scale': net.norm.weight, 'bias': net.norm.bias,
          'w1': net.classifier.weight, 'b1': net.classifier.bias,
          'mean': net.norm.running_mean, 'variance': net.norm.running_var}


def numbers_of(net: Any, prefix: str = '') -> dict[str, np.ndarray]:
  """What `normalized` was made of, as it is now."""
  return {prefix + name: place.detach().numpy().T.copy()
          for name, place in _places(net).items() if place is not None}


def draw_normalized(rng: np.random.Generator, width: int, hidden: int,
                    num_classes: int, scale: float = 1.0
                    ) -> dict[str, np.ndarray]:
  """Draws what `normalized` is made of: its `perceptron`, and the norm."""
  return {**draw_weights(rng, width, hidden, num_classes, scale),
          'scale': rng.uniform(0.7, 1.4, hidden),
          'bias': rng.normal(size=hidden) * 0.2,
          'mean': rng.normal(size=hidden) * 0.3,
          'variance': rng.uniform(1, 2, hidden)}


class Watch:
  """Takes the place of a module's `logging`: keeps a step's own variables.

  Attributes:
    rows: of each line on a batch, the chosen variables by name.
  """

  def __init__(self, *names: str) -> None:
    self._names = names
    self.rows: list[dict[str, np.ndarray]] = []

  def info(self, message: str) -> None:
    there = sys._getframe(1).f_locals
    if 'Batch' in message:
      self.rows.append({name: there[name].detach().numpy().copy()
                        for name in self._names})

  def stacked(self, prefix: str = '') -> dict[str, np.ndarray]:
    """Every variable over the lines."""
    return {prefix + name: np.stack([row[name] for row in self.rows])
            for name in self._names}


def save(out: pathlib.Path, commit: str, **arrays: Any) -> None:
  """Writes the npz file, with the authors' commit."""
  np.savez_compressed(out, commit=commit, **arrays)
  print(f'{out}: {out.stat().st_size} bytes')
