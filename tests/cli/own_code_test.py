"""Methods, networks, sets and settings of the user's own, from any folder."""
from __future__ import annotations

from collections.abc import Iterator
import json
import pathlib
import shutil
import textwrap

import numpy as np
import pytest

import fedjax_ssl
from fedjax_ssl import data
from fedjax_ssl.core import imports
from tests.cli import launcher

EXAMPLE = launcher.EXPERIMENTS / 'examples' / 'sharpened_fixmatch.py'
TINY = ('--model=linear', '--num_clients=6', '--cohort_size=3',
        '--local_steps=1', '--unlabeled_batch=20', '--strong=none',
        '--lr_schedule=constant', '--seeds=0', '--nobounds', '--num_devices=1',
        '--eval_every=2')
NAME = 'sharpened_fixmatch(threshold=0.2)'


def train(folder: pathlib.Path, *flags: str, setting='digits_dirdir',
          workdir='run'):
  return launcher.call('train', setting, *TINY, '--num_rounds=2',
                       f'--workdir={workdir}', *flags, place=str(folder))


def refusal(done) -> str:
  """The one line of what was refused."""
  assert done.returncode == 2, done.stderr
  line, = done.stderr.splitlines()
  assert line.startswith('error: ')
  return line


@pytest.fixture(scope='module')
def trained(tmp_path_factory) -> pathlib.Path:
  """A folder elsewhere with the example, and a run of it."""
  folder = tmp_path_factory.mktemp('own')
  shutil.copy(EXAMPLE, folder / 'mine.py')
  done = train(folder, f'--method=./mine.py:{NAME}')
  assert done.returncode == 0, done.stderr
  return folder


@pytest.fixture
def copied(trained, tmp_path) -> pathlib.Path:
  """The run alone, elsewhere; its file is where it was."""
  shutil.copytree(trained / 'run', tmp_path / 'run')
  return tmp_path / 'run'


def test_the_example_is_trained_from_another_folder(trained):
  stored = json.loads((trained / 'run' / 'config.json').read_text())
  assert stored['flags']['method'] == f'{trained / "mine.py"}:{NAME}'
  assert stored['facts']['choices']['method']['knobs'] == {
      'threshold': 0.2, 'sharpening': 0.5}
  assert (trained / 'run' / 'code' / 'mine.py').read_bytes() == (
      EXAMPLE.read_bytes())


def accuracies(run: pathlib.Path) -> float:
  return json.loads(
      (run / 'metrics.jsonl').read_text().splitlines()[-1])['accuracy']


def test_it_is_evaluated_and_predicts(trained, tmp_path):
  done = launcher.call('evaluate', str(trained / 'run'), place=str(tmp_path))
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout)['accuracy'] == accuracies(trained / 'run')
  test = data.load('digits').test
  logits = fedjax_ssl.load(trained / 'run').predict(test.inputs)
  assert np.mean(np.asarray(logits).argmax(-1) == test.labels) == (
      pytest.approx(accuracies(trained / 'run'), abs=1e-6))


@pytest.fixture
def gone(trained) -> Iterator[pathlib.Path]:
  """The path of the file, which is not there meanwhile."""
  aside = (trained / 'mine.py').rename(trained / 'aside')
  yield trained / 'mine.py'
  aside.rename(trained / 'mine.py')


def test_without_its_file_a_run_has_its_copy(gone, copied, tmp_path):
  done = launcher.call('evaluate', str(copied), place=str(tmp_path))
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout)['accuracy'] == accuracies(copied)
  shown = launcher.call('repeat', str(copied), '--print')
  assert f'--method={copied}/code/mine.py:{NAME}' in shown.stdout
  assert f'{gone} has gone; its copy' in shown.stderr
  assert fedjax_ssl.load(copied).round == 2
  shutil.rmtree(copied / 'code')
  for line in (refusal(launcher.call('evaluate', str(copied))),
               refusal(launcher.call('repeat', str(copied), '--print'))):
    assert f'{gone}, which is not here' in line and 'SHA-256' in line
  with pytest.raises(ValueError, match='mine.py, which is not here'):
    fedjax_ssl.load(copied)


def test_a_file_is_run_as_python_runs_it(tmp_path):
  """Its annotations are what it says, not their texts."""
  file = tmp_path / 'plain.py'
  file.write_text('def f(x: int): ...\n')
  module = imports.load(str(file))
  assert module.f.__annotations__ == {'x': int}


def test_a_flagfile_may_bring_the_setting(tmp_path):
  file, flags = tmp_path / 'brings.py', tmp_path / 'run.flags'
  file.write_text('import fedjax_ssl\n@fedjax_ssl.register_setting("brought", '
                  '"About.")\ndef deal(*args): ...\n')
  flags.write_text(f'# A run.\n--import={file}\n')
  done = launcher.call('train', 'brought', f'--flagfile={flags}', '--help')
  assert 'About.' in done.stdout and done.returncode in (0, 1), done.stderr
  flags.write_text('--seed=1\n')
  assert "'brought' is no setting" in refusal(launcher.call(
      'train', 'brought', f'--flagfile={flags}'))
  flags.write_bytes(b'\xff\xfe')
  for program in (('train', 'brought'), ('train', 'digits_dirdir')):
    assert refusal(launcher.call(*program, f'--flagfile={flags}')) == (
        f'error: --flagfile={flags} cannot be read: it is no text.')
  flags.write_text('--seed=1\n', 'utf-8-sig')
  assert refusal(launcher.call('train', 'digits_dirdir', f'--flagfile={flags}')
                 ) == (f'error: --flagfile={flags} begins with a byte order '
                       'mark; save it without one.')


def test_a_run_is_never_continued_with_other_code(trained, copied, tmp_path):
  (tmp_path / 'mine.py').write_bytes(EXAMPLE.read_bytes() + b'\n# Another.\n')
  flags = (f'--workdir={copied}', '--num_rounds=3')
  before = launcher.fingerprints(copied)
  line = refusal(train(tmp_path, f'--method=mine.py:{NAME}', *flags))
  assert 'mine.py has changed since the run' in line
  assert f'{copied}/code/mine.py' in line
  assert launcher.fingerprints(copied) == before
  # Its copy would not help here.
  line = refusal(train(tmp_path, '--method=uda', *flags))
  assert 'holds a run with other flags: method' in line
  done = train(tmp_path, f'--method={copied}/code/mine.py:{NAME}', *flags)
  assert done.returncode == 0, done.stderr
  assert 'round 3/3' in done.stderr


MODULE = '''
  """Of a user."""
  from flax import linen as nn
  import numpy as np
  import fedjax_ssl
  from fedjax_ssl import data, models

  class Net(nn.Module):
    num_classes: int
    width: int = 4

    @nn.compact
    def __call__(self, x, train: bool):
      x = nn.Dense(self.width)(x.reshape(x.shape[0], -1))
      x = nn.BatchNorm(use_running_average=not train)(x)
      return nn.Dense(self.num_classes)(nn.relu(x))

  @data.register_dataset('squares', flip=False)
  def squares():
    """Dark and bright ones."""
    labels = np.arange(200) % 2
    images = (100 + 100 * labels[:, None, None] + np.zeros((1, 4, 4)))
    images = images.astype(np.uint8)
    return {'train': (images, labels), 'test': (images[:50], labels[:50])}

  @fedjax_ssl.register_setting('halves', 'Every second row has a label.',
                               dataset='squares', num_clients=4,
                               cohort_size=2, weak='none')
  def halves(rng, labels, pool, options):
    owner = rng.integers(0, options.num_clients, labels.size)
    known = np.arange(labels.size) % 4 < 2
    return np.where(pool & known, owner, -1), np.where(pool & ~known, owner, -1)
'''


def _set(body: str, arguments: str = '') -> str:
  return textwrap.dedent(f"""
      import numpy as np
      from fedjax_ssl import data

      y = np.arange(200) % 2
      x = (100 + 100 * y[:, None, None] + np.zeros((1, 4, 4))).astype(np.uint8)

      @data.register_dataset('squares')
      def squares({arguments}):
        {body}
      """)


def test_what_a_decorator_fills_in_is_no_part_of_the_call(tmp_path):
  (tmp_path / 'parts.py').write_text(_set("""return images, y, images, y
""", 'images').replace('@data', """
def of(images):
  def give(function):
    @functools.wraps(function)
    def given():
      return function(images)
    return given
  return give

@data""").replace("('squares')", "('squares')\n@of(x)").replace(
    'import numpy', 'import functools\nimport numpy'))
  done = train(tmp_path, '--import=./parts.py', '--dataset=squares',
               '--num_clients=4', '--cohort_size=2', setting='own_data')
  assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('body', [
    'return x, y, x[:50], y[:50]',
    'return dict(x_train=x, y_train=y, x_test=x[:50], y_test=y[:50])'])
def test_a_set_in_the_forms_that_fit_takes(tmp_path, body):
  (tmp_path / 'parts.py').write_text(_set(body))
  done = train(tmp_path, '--import=./parts.py', '--dataset=squares',
               '--num_clients=4', '--cohort_size=2', setting='own_data')
  assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('body, arguments, words', [
    ('return 3', '', "data set 'squares': its function must give"),
    ('return dict(train=(x, y))', '', 'as a tuple or dict; x_train is missing'),
    ('return dict(x_train=x, y_train=y, x_test=x, y_test=y, x_val=x)', '',
     'y_val is missing'),
    ('return x, y, x, y', 'data_dir', 'must take no arguments')])
def test_a_set_in_another_form_is_refused(tmp_path, body, arguments, words):
  (tmp_path / 'parts.py').write_text(_set(body, arguments))
  assert words in refusal(train(
      tmp_path, '--import=./parts.py', '--dataset=squares',
      '--num_clients=4', '--cohort_size=2', setting='own_data'))


@pytest.mark.parametrize('given, words', [
    ('loss', 'its loss returns an array; allowed is (loss, Aux('),
    ('(loss, {})', 'its loss returns an array, dict; allowed is (loss, Aux('),
    ('(labeled.sum(-1), Aux(stats, {}))', 'its loss has the shape [10]'),
    ("(loss, Aux(stats, {'x': labeled}))", "its metric 'x' has the shape [10"),
    ('(loss.astype(int), Aux(stats, {}))', 'its loss is of type int32;'),
    ("(loss, Aux(stats, {'x': 'a'}))", "its metric 'x' is of type str; allowed")
    ])
def test_what_a_loss_must_not_return_is_one_line(tmp_path, given, words):
  (tmp_path / 'mine.py').write_text(textwrap.dedent(f"""
      from fedjax_ssl import losses
      from fedjax_ssl.core.local_training import Aux
      from fedjax_ssl.methods.parts import averaging, network

      def mine(task):
        def loss_fn(model, given, batch, key):
          (labeled,), stats = network.forward(
              task, model, batch.labeled, key=key)
          loss, _ = losses.cross_entropy(
              labeled, batch.labeled.labels, batch.labeled.mask)
          return {given}
        return averaging.averaging(task, loss_fn, streams='labeled')
      """))
  assert words in refusal(train(tmp_path, '--method=mine.py:mine'))


@pytest.mark.parametrize('flag', ['weak', 'strong', 'model'])
def test_a_function_of_another_signature_is_named_by_its_flag(tmp_path, flag):
  (tmp_path / 'mine.py').write_text('def mine(key, x): return x\n')
  said = refusal(train(tmp_path, f'--{flag}=mine.py:mine'))
  assert said.startswith(f'error: --{flag}=')
  assert 'mine.py:mine: is called with no arguments' in said
  assert "'key'" in said


def test_a_network_a_set_and_a_setting(tmp_path):
  (tmp_path / 'parts.py').write_text(textwrap.dedent(MODULE))
  flags = ('--import=./parts.py', '--model=parts.py:Net(width=6)',
           '--learning_rate=0.5')
  done = train(tmp_path, *flags, setting='halves')
  assert done.returncode == 0, done.stderr
  assert accuracies(tmp_path / 'run') > 0.9  # Of two classes.
  stored = json.loads((tmp_path / 'run' / 'config.json').read_text())
  assert stored['flags']['imports'] == [str(tmp_path / 'parts.py')]
  assert stored['facts']['choices']['model']['knobs'] == {'width': 6}
  evaluated = launcher.call('evaluate', str(tmp_path / 'run'))
  assert evaluated.returncode == 0, evaluated.stderr
  assert fedjax_ssl.load(tmp_path / 'run').state.server
  shown = launcher.call('repeat', str(tmp_path / 'run'), '--print')
  assert f'--import={tmp_path}/parts.py\n' in shown.stdout
  listed = launcher.call('list', 'settings', 'halves',
                         f'--import={tmp_path}/parts.py')
  assert 'Every second row has a label.' in listed.stdout


@pytest.mark.parametrize('flag, words', [
    ('--method=none.py:mine', '--method=none.py:mine: there is no file'),
    ('--method=broken.py:mine', "cannot be imported: ModuleNotFoundError: No "
     "module named 'nowhere' (at "),
    ('--method=bad.py:mine', 'SyntaxError'),
    ('--method=empty.py:mine', "has no 'mine'. It has: other, stacks."),
    ('--method=empty.py:othr', "Did you mean 'other'?"),
    ('--method=empty.py:other(weight=1)', "has no knob 'weight'"),
    ('--method=empty.py:other', 'gives no Method but NoneType'),
    ('--aggregator=empty.py:stacks', ' gives params'),
    ('--model=no.such.module:Net', "there is no module 'no'"),
    ('--model=empty.py:other', 'gives no Flax linen module but NoneType'),
    ('--import=none.py', '--import=none.py: there is no file'),
    ('--import=', '--import= names nothing; name a file or a module'),
    ('--import=empty.py,broken.py', 'broken.py:2'),
    ('--method=a b:c', "'a b' is neither the path of a file nor the name")])
def test_what_is_wrong_is_one_line(tmp_path, flag, words):
  (tmp_path / 'broken.py').write_text('\nimport nowhere\n')
  (tmp_path / 'bad.py').write_text('def mine(\n')
  (tmp_path / 'empty.py').write_text('def other(*_): pass\n'
                                     'def stacks(x, weights): return x\n')
  assert words in refusal(train(tmp_path, flag))
  assert not (tmp_path / 'run').exists()


def test_what_fails_in_a_users_method_names_its_line(tmp_path):
  (tmp_path / 'fails.py').write_text(
      "def mine(task):\n  raise ValueError('no such thing')\n")
  line = refusal(train(tmp_path, '--method=fails.py:mine'))
  assert 'no such thing' in line and 'fails.py:2' in line
