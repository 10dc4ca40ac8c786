"""Data sets by name: digits, files, folders of images, TensorFlow Datasets."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import fractions
import inspect
import itertools
import math
import os
import pathlib
import re
from typing import Any, NamedTuple, TypeVar

import numpy as np

from fedjax_ssl.core import checks, registry
from fedjax_ssl.core.types import Examples
from fedjax_ssl.data.datasets import files, folder, text, tfds, tokens
from fedjax_ssl.data.files import DataError, DataNameError
from fedjax_ssl.data.partition import labeling

__all__ = ('DATASETS', 'DATA_DIR', 'DataError', 'Dataset', 'load', 'register',
           'split_validation')

NAME = r'\w[\w.+-]{0,99}'  # Of a data set, its file without the end.
# Environment variable: the folder of data sets.
DATA_DIR = 'FEDJAX_SSL_DATA'
# What `fit` calls the data that it was given in place of a name.
ARRAYS, FEDERATION = 'arrays', 'federation'

# Mean and standard deviation of each channel, as the papers' codes use them:
# FedDure for CIFAR-10, RSCFed for CIFAR-100 and ISIC. Others are computed.
_NORMALIZATION: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    'cifar10': ((.4914, .4822, .4465), (.2470, .2435, .2616)),
    'cifar100': ((.5071, .4865, .4409), (.2673, .2564, .2762)),
    'svhn': ((.4377, .4438, .4728), (.1980, .2010, .1970)),
    'cinic10': ((.4789, .4723, .4305), (.2421, .2383, .2587)),
    'isic': ((.7630, .5456, .5700), (.1409, .1526, .1700)),
}
_SAME = {'svhn_cropped': 'svhn', 'isic2018': 'isic'}
# A mirrored digit or letter is another one, or none; a mirrored left kidney is
# a right one.
_NO_FLIP = frozenset(
    ('digits', 'mnist', 'svhn', 'emnist', 'kmnist', 'qmnist', 'usps',
     'organamnist', 'organcmnist', 'organsmnist'))


class Dataset(NamedTuple):
  """A data set in host memory."""

  name: str
  # Images uint8[D, H, W, C], token ids int32[D, T] or vectors float16[D, T, E];
  # labels int32[D], -1 if it is not known.
  train: Examples
  test: Examples
  num_classes: int  # C.
  mean: tuple[float, ...]  # Of each channel, of pixels scaled to [0, 1].
  std: tuple[float, ...]
  flip: bool  # Whether a mirrored image is still of its class.
  validation: Examples | None = None  # Where the set or the split has one.
  owner: np.ndarray | None = None  # int32[D], client of each row of train.
  client_names: tuple[str, ...] | None = None  # Of the N owners.
  class_names: tuple[str, ...] | None = None  # Of the C classes, if said.
  vocabulary: Mapping[str, int] | None = None  # Of texts: tokens of words.

  def __repr__(self) -> str:
    size, rest = len(self.train.labels), len(self.test.labels)
    return (f'Dataset {self.name}: {size:,} rows to train on, {rest:,} to test '
            f'on, {self.num_classes} classes, inputs '
            f'{tuple(self.train.inputs.shape[1:])}')

  def encode(self, texts: Sequence[str]) -> np.ndarray:
    """Turns texts into inputs, token ids int32[D, T], as its own were.

    Raises:
      TypeError: for one text that is in no list.
      ValueError: if it holds no texts, or their vectors.
    """
    if isinstance(texts, str):
      raise TypeError(f'encode takes a list of texts: [{texts[:40]!r}].')
    if self.vocabulary is None:
      raise ValueError(f'{self.name} has no vocabulary, as data sets of texts '
                       'have without embeddings.')
    return tokens.encode(texts, self.vocabulary)


DATASETS: registry.Registry[Callable[..., Any]] = registry.Registry(
    'dataset', {}, 'fedjax_ssl.datasets')
_Builder = TypeVar('_Builder', bound=Callable[..., Any])


def register(name: str, *, flip: bool | None = None
             ) -> Callable[[_Builder], _Builder]:
  """Decorates a function that makes a data set, to register it under a name.

  ```python
  @data.register_dataset('mine', flip=False)
  def mine():
    return {'train': (images, labels), 'test': (images, labels)}
  ```

  The function takes no arguments, and is called when the set is loaded. It may
  return `validation` too; or, as for `fit`, (x_train, y_train, x_test, y_test)
  or a dict of these. All is as `files.read_npz` takes it; a dict may hold
  `class_names` and `client_train`, too.

  Args:
    name: see `core.registry.register`.
    flip: whether a mirrored image is still of its class; None: it is, unless a
      set of this name is known to have digits, letters or organs.

  Raises:
    ValueError: for the name 'digits', or one that is taken or no identifier.
  """
  if name == 'digits':
    raise ValueError("dataset 'digits' comes with the library; choose another "
                     'name.')

  def add(builder: _Builder) -> _Builder:
    DATASETS.register(name)(builder)
    _FLIPS[name] = flip
    return builder
  return add


# What was said of registered sets, by their names.
_FLIPS: dict[str, bool | None] = {}


def load(name: str, data_dir: str | os.PathLike[str] | None = None, *,
         split: str = 'official', split_seed: int = 0,
         embeddings: str | os.PathLike[str] | None = None) -> Dataset:
  """Loads a data set.

  Looks in this order: 'digits' comes with scikit-learn (1797 images of 8x8,
  every fifth of each class is test: 1437 / 360); what is registered, or
  an entry point of an installed package; `data_dir/<name>.npz`
  (a '/' in the name is written '_'); `data_dir/<name>.csv`, texts;
  `data_dir/<name>/`, images in `train/CLASS/` and `test/CLASS/`, see
  `folder.read`; TensorFlow Datasets, prepared with file format array_record in
  `data_dir` or in its own folder.

  Args:
    name: 'digits', 'cifar10', 'emnist/byclass', ...
    data_dir: folder; None reads the environment variable FEDJAX_SSL_DATA.
    split: 'official', or 'train/test' or 'train/validation/test': all
      examples are merged, shuffled and cut, by percent if the numbers sum to
      100 ('80/5/15'), else by count ('54000/3000/3000', as FedMatch does;
      what is left over stays unused). Results on a re-split set do not compare
      with those on the official one. The words of texts stay those of the
      official train part.
    split_seed: seed of that shuffle.
    embeddings: of texts only, see `text.read_csv`.

  Returns:
    Dataset. Mean and standard deviation are the papers' constants where
    there are some, else computed from `train`.

  Raises:
    DataError: if the set is missing or broken.
    FieldError: if `name` is that of a file, `data_dir` is no folder, `split`
      cannot be made, or `embeddings` are broken, of other texts, or given for
      images, or for texts that are in no CSV.
  """
  if isinstance(name, os.PathLike):
    name = os.fspath(name)
  if not isinstance(name, str):
    raise checks.FieldError('dataset', repr(name),
                            "must be a name, as 'digits'.")
  if (file := pathlib.Path(name)).suffix in ('.npz', '.csv'):
    raise checks.FieldError(
        'dataset', name, f'is a file: give {file.stem}, and its folder'
        f'{"" if file.name == name else f", {file.parent},"} as '
        f'{checks.option("data_dir")}.')
  if not re.fullmatch(rf'{NAME}(/{NAME})?', name):
    _refuse_path(name)
    raise DataNameError(
        'dataset', name, f'{name!r} is no name of a data set; allowed are '
        'letters, digits and _ . + -, 100 at most, as in NAME or NAME/CONFIG.')
  registered = None if name == 'digits' else _registered(name)
  source = (files.Source(_digits()) if name == 'digits' else
            registered if registered else
            _read(name, data_dir, embeddings))
  if embeddings is not None and source.vocabulary is not None:
    raise checks.FieldError('embeddings', os.fspath(embeddings),
                            'they go with texts of a CSV.')
  if split != 'official':
    source = _resplit(source, split, split_seed)
  parts = source.parts
  train = parts['train']
  _check_classes(name, parts)
  owner, client_names = source.owners()
  mean: tuple[float, ...] = (0.0,)
  std: tuple[float, ...] = (1.0,)
  flip = False
  if train.inputs.ndim >= 4:
    if embeddings is not None:
      raise checks.FieldError('embeddings', os.fspath(embeddings),
                              f'they are of texts, and {name} has images.')
    base = _SAME.get(name.split('/')[0], name.split('/')[0])
    mean, std = _NORMALIZATION.get(base, ((), ()))
    if len(mean) != train.inputs.shape[-1]:
      mean, std = moments(np.asarray(train.inputs))
    said = _FLIPS.get(name)
    flip = base not in _NO_FLIP if said is None else said
  return Dataset(
      name, train, parts['test'], int(train.labels.max()) + 1, mean, std, flip,
      parts.get('validation'), owner, client_names, source.class_names,
      source.vocabulary)


def in_folder(data_dir: str | os.PathLike[str]
              ) -> dict[str, pathlib.Path]:
  """Finds the files and folders of images that `load` reads by their names.

  Args:
    data_dir: a folder of this machine; one that is not there has none.

  Returns:
    Where each lies, by name, in alphabetical order. What is registered, and
    'digits', is left out: `load` takes these first.
  """
  place = pathlib.Path(os.path.expanduser(data_dir))
  # Of one name the file of arrays comes before that of texts, folders last.
  found = {one.name: one for one in place.glob('*') if folder.holds(one)}
  for ending in ('csv', 'npz'):
    found |= {file.stem: file for file in place.glob(f'*.{ending}')}
  return {name: found[name] for name in sorted(found)
          if re.fullmatch(NAME, name) and name not in ('digits', *DATASETS)}


def _check_classes(name: str, parts: Mapping[str, Examples]) -> None:
  """Raises DataError for a class that no row to train on is of."""
  counts = {part: np.bincount(rows.labels[rows.labels >= 0])
            for part, rows in parts.items()}
  most = max(map(len, counts.values()))
  held = np.zeros(most, int)
  held[:len(counts['train'])] = counts['train']
  if not held.all():
    raise DataError(f'{name}: of {most} classes no row to train on is of class '
                    f'{int(held.argmin())}')


def split_validation(rng: np.random.Generator, examples: Examples,
                     fraction: float) -> tuple[Examples, Examples]:
  """Splits off round(fraction * D) rows, each class in its share.

  Args:
    rng: host generator.
    examples: D rows.
    fraction: share in [0, 1] of the second part.

  Returns:
    What remains, and the validation examples, both in their old order.
  """
  held = labeling.choose_validation(rng, np.asarray(examples.labels),
                                    fraction=fraction)
  return (Examples(examples.inputs[~held], examples.labels[~held]),
          Examples(examples.inputs[held], examples.labels[held]))


def _digits() -> dict[str, Examples]:
  from sklearn import datasets  # pylint: disable=g-import-not-at-top
  raw = datasets.load_digits()
  inputs = np.rint(raw.images * (255 / 16)).astype(np.uint8)[..., None]
  labels = raw.target.astype(np.int32)
  is_test = np.zeros(labels.shape, bool)
  is_test[np.argsort(labels, kind='stable')[::5]] = True
  return {'train': Examples(inputs[~is_test], labels[~is_test]),
          'test': Examples(inputs[is_test], labels[is_test])}


def _registered(name: str) -> files.Source | None:
  """Returns what a registered set holds; None if there is none of that name."""
  if name not in DATASETS and (
      not name.isidentifier() or name not in DATASETS.entry_points()):
    return None
  builder = registry.find(DATASETS, name)
  try:
    inspect.signature(builder, follow_wrapped=False).bind()
  except TypeError as error:
    raise DataError(f'data set {name!r}: its function must take no arguments '
                    f'({error})') from error
  made, beside = _by_part(name, builder())
  try:
    return files.of_arrays(
        {part: (files.as_array(files.PARTS[part][0], inputs),
                files.as_array(files.PARTS[part][1], labels))
         for part, (inputs, labels) in made.items()},
        {key: files.as_array(key, value) for key, value in beside.items()})
  except (DataError, TypeError, ValueError) as error:
    raise DataError(f'{name}: {error}') from error


def _by_part(name: str, made: Any
             ) -> tuple[Mapping[str, Any], dict[str, Any]]:
  """Returns inputs and labels of each part, and what a function said beside."""
  if isinstance(made, tuple | list) and len(made) == len(files.KEYS):
    made = dict(zip(files.KEYS, made, strict=True))
  beside = {key: made[key] for key in files.BESIDE
            if isinstance(made, Mapping) and key in made}
  if isinstance(made, Mapping) and {'train', 'test'} <= {*made} <= {
      *files.PARTS, *beside}:
    return {part: one for part, one in made.items()
            if part not in beside}, beside
  if not isinstance(made, Mapping):
    why = f'not {type(made).__name__}'
  elif not (why := files.unfit(made)):
    return {part: (made[inputs], made[labels]) for part, (inputs, labels)
            in files.PARTS.items() if inputs in made}, beside
  raise DataError(f"data set '{name}': its function must give {{'train': "
                  "(x, y), 'test': (x, y)}, or x_train, y_train, x_test and "
                  f'y_test as a tuple or dict; {why}')


def _refuse_path(name: str) -> None:
  """Raises FieldError if a name is the path of a folder of images."""
  place = pathlib.Path(name)
  if name and folder.holds(place):
    raise checks.FieldError(
        'dataset', name, f'is a folder: give its name, {place.resolve().name}, '
        f'and the folder that it is in, {place.resolve().parent}, as data_dir.')


def _read(name: str, data_dir: str | os.PathLike[str] | None,
          embeddings: str | os.PathLike[str] | None) -> files.Source:
  """Reads `data_dir/<name>.npz`, .csv or folder, or TensorFlow Datasets."""
  if data_dir is None:
    data_dir = os.environ.get(DATA_DIR) or None
  file = name.replace('/', '_') + '.npz'
  if data_dir is None:
    advice = (f'{_absent(name)}: set {checks.option("data_dir")} (or '
              f'{DATA_DIR}) to a folder with {file}')
  else:
    data_dir = os.path.expanduser(data_dir)
    path = pathlib.Path(data_dir) / file
    # A bucket is read by TensorFlow Datasets only.
    if '://' not in os.fspath(data_dir):
      if not path.parent.is_dir():
        raise checks.FieldError('data_dir', os.fspath(data_dir),
                                'is no folder.')
      if not os.access(path.parent, os.X_OK):
        raise checks.FieldError('data_dir', os.fspath(data_dir),
                                'cannot be read: no permission.')
    if path.exists():
      return files.read_npz(path)
    if path.with_suffix('.csv').exists():
      return text.read_csv(path.with_suffix('.csv'), embeddings and (
          os.path.expanduser(embeddings)))
    if folder.holds(path.parent / name):
      return folder.read(path.parent / name, name)
    there = path.parent / name
    for link in (path, path.with_suffix('.csv'), there):
      if link.is_symlink() and not link.exists():
        raise DataError(f'{link} is a link to {os.readlink(link)}, which is '
                        'not there')
    advice = f'{_absent(name, data_dir)}: there is ' + (
        f'no {there / "train"}' if there.is_dir() else f'no {path}')
  _refuse_path(name)
  if name in (ARRAYS, FEDERATION):
    raise DataNameError(
        'dataset', name, f'data set {name!r} not found: so a run is marked '
        'that fedjax_ssl.fit made of data given in Python; call it again with '
        'these data')
  advice += (' (keys x_train, y_train, x_test, y_test; uint8 images), or a '
             '.csv of that name (columns text and label), or a folder of that '
             'name (train/CLASS/*.png and test/CLASS/*.png)')
  return files.Source(tfds.read_tfds(name, data_dir, advice))


def _absent(name: str, data_dir: str | os.PathLike[str] | None = None) -> str:
  """Says that there is no such set, and the nearest name that there is."""
  near = checks.near(name, {
      'digits', *DATASETS, *(in_folder(data_dir) if data_dir else ())})
  return f'data set {name!r} not found{near and f" ({near.strip()})"}'


def _resplit(source: files.Source, split: str, seed: int) -> files.Source:
  """Merges all parts and cuts them anew."""
  parts, clients = source.parts, source.clients
  nobodys = any(part not in clients or clients[part].dtype.kind == 'U'
                and (clients[part] == '').any() for part in parts)
  if clients and nobodys:
    raise checks.FieldError(
        'split', split, 'would have rows to train on of no client: those of '
        'the other parts name none; leave it official.')
  merged = Examples(
      np.concatenate([parts[k].inputs for k in sorted(parts)]),
      np.concatenate([parts[k].labels for k in sorted(parts)]))
  total = len(merged.labels)
  names = {2: ('train', 'test'), 3: ('train', 'validation', 'test')}
  texts = split.split('/')
  if len(texts) not in names or not all(
      re.fullmatch(r'[0-9]+(\.[0-9]+)?', text) for text in texts):
    raise checks.FieldError(
        'split', split, "must be 'official', 'train/test' or "
        "'train/validation/test' in percent or counts.")
  # Exactly as written: the floats of 70.1, 19.8 and 10.1 sum to less than 100.
  numbers = [fractions.Fraction(text) for text in texts]
  counts = sum(numbers) != 100
  ends = [int(end) if counts else round(total * end / 100)
          for end in itertools.accumulate(numbers)]
  sizes = np.diff(ends, prepend=0)
  if ends[-1] > total or min(sizes) < 1 or counts and (
      any(n != int(n) for n in numbers)
      # Less than a tenth is hardly meant: these are percents with a slip.
      or max(numbers) < 100 and 10 * sum(numbers) < total):
    raise checks.FieldError(
        'split', split, f'cannot be made of {total} examples: '
        + (f'{float(sum(numbers)):g} is neither 100 percent nor a count that '
           'is meant' if counts and max(numbers) < 100 else
           'a part would be empty, broken or too large')
        + '; give percents that sum to 100, or counts.')
  if (merged.labels < 0).any():
    raise checks.FieldError(
        'split', split, 'the set has rows without a label (-1), which cannot '
        'be tested on; give official.')
  order = np.random.default_rng(seed).permutation(total)
  owners = (np.concatenate([clients[k] for k in sorted(parts)])
            if clients else None)
  cut, cut_clients = {}, {}
  for part, end, size in zip(names[len(texts)], ends, sizes, strict=True):
    rows = np.sort(order[end - size:end])
    cut[part] = Examples(merged.inputs[rows], merged.labels[rows])
    if owners is not None:
      cut_clients[part] = owners[rows]
  present = np.bincount(cut['train'].labels,
                        minlength=int(merged.labels.max()) + 1)
  if present.min() == 0:
    raise checks.FieldError('split', split, 'leaves train without class '
                            f'{np.argmin(present)}.')
  return source._replace(parts=cut, clients=cut_clients)


# Numbers that are counted at once.
_AT_ONCE = 1 << 22


def moments(inputs: np.ndarray
             ) -> tuple[tuple[float, ...], tuple[float, ...]]:
  """Computes mean and standard deviation of each channel.

  Sums are of whole numbers, so that every machine gets the same bits, and it
  needs little memory. The standard deviation of a channel with one value is 1,
  as images are divided by it.
  """
  values = np.arange(256)
  means, stds = [], []
  # `bincount` makes each number eight bytes long.
  parts = np.array_split(inputs, 1 + inputs.size // _AT_ONCE)
  for channel in range(inputs.shape[-1]):
    counts = np.sum([np.bincount(part[..., channel].ravel(), minlength=256)
                     for part in parts], axis=0)
    number, first, second = (
        int((counts * values**power).sum()) for power in range(3))
    means.append(first / (255 * number))
    stds.append(math.sqrt(
        (number * second - first**2) / (255 * number)**2) or 1.0)
  return tuple(means), tuple(stds)
