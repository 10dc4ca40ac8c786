"""The flags by name, the scripts' help, and the flagfiles."""
from __future__ import annotations

import pathlib
import re

from absl.testing import flagsaver
import pytest
import settings

import common
from fedjax_ssl import methods
from fedjax_ssl.data import augment
from tests import toy
from tests.experiments import launcher

FLAGS = common.FLAGS
# Shared by every experiment, and relied on by those who script runs.
NAMES = """
method profile model dataset data_dir split validation_fraction partition_file
partition_seed num_clients num_labeled_clients cohort_size num_rounds
schedule_rounds rounds_per_task alpha labels labels_per_class labeled_fraction
labels_at optimizer learning_rate momentum weight_decay lr_schedule
local_epochs local_steps labeled_batch unlabeled_batch weak strong norm seed
seeds seed_map eval_every checkpoint_every client_map conv_impl chunk_size
aggregation_order max_update_norm compute_dtype workdir eval_only
""".split()
SCRIPTS = [p for p in sorted(launcher.EXPERIMENTS.glob('*.py'))
           if re.search(r'^  common\.main\(', p.read_text(), re.MULTILINE)]
FLAGFILES = sorted((launcher.EXPERIMENTS / 'flagfiles').glob('*.flags'))


@pytest.fixture(autouse=True)
def flag_values():
  saved = flagsaver.save_flag_values()
  yield
  flagsaver.restore_flag_values(saved)


def test_every_name_is_a_flag():
  assert set(NAMES) <= {*settings.all_names()}
  for name in settings.all_names():
    assert FLAGS[name].help


def test_choices():
  for name, values in {
      'labels': ['few', 'all'], 'labels_at': ['clients', 'server'],
      'norm': ['auto', 'none', 'batch', 'group', 'static'],
      'seed_map': ['auto', 'map', 'vmap'],
      'client_map': ['auto', 'map', 'vmap'],
      'aggregation_order': ['fixed', 'fast']}.items():
    parser = FLAGS[name].parser
    assert [*parser.enum_values] == values  # type: ignore[attr-defined]


def parse(*args: str) -> None:
  FLAGS(['script', *args])
  settings.check()


def test_defaults_of_seeds_yield_to_the_command_line():
  FLAGS.set_default('seeds', ['0', '1'])
  parse()
  assert settings.seeds() == [0, 1]
  parse('--seed=7')
  assert settings.seeds() == [7]


def test_several_seeds():
  parse('--seeds=3,1')
  assert settings.seeds() == [3, 1]


def test_a_fraction_beats_a_default_number_of_labels():
  FLAGS.set_default('labels_per_class', 10)
  parse('--labeled_fraction=0.1')
  assert FLAGS.labels_per_class is None and FLAGS.labeled_fraction == 0.1


def test_profile_becomes_a_knob():
  parse('--method=rscfed(beta=2)', '--profile=paper')
  assert settings.method() == "rscfed(beta=2, profile='paper')"
  FLAGS['method'].value = settings.method()  # As a run stores it.
  assert settings.method() == "rscfed(beta=2, profile='paper')"


def test_a_run_may_change_only_what_changes_no_bit():
  assert {*settings.FREE} <= {*settings.all_names()}
  assert not {*settings.FREE} & {
      'method', 'model', 'seeds', 'alpha', 'learning_rate', 'chunk_size',
      'client_map', 'aggregation_order', 'conv_impl', 'compute_dtype'}


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda p: p.stem)
def test_help(script, tmp_path):
  started = launcher.start(tmp_path / 'run', '--help', script=script)
  # absl's own code for help.
  assert started.wait() == 1
  output = started.output()
  assert script.read_text().splitlines()[0].split('"""')[1][:40] in output
  for name in NAMES:
    assert f'--{name}:' in output or f'--[no]{name}:' in output
  assert not (tmp_path / 'run').exists()


def defaults(script: pathlib.Path) -> str:
  return script.read_text().split('common.main(')[1]


@pytest.mark.parametrize('file', FLAGFILES, ids=lambda p: p.name)
def test_flagfiles_parse_against_their_scripts(file):
  script = launcher.EXPERIMENTS / f'{file.name.split(".")[0]}.py'
  assert script in SCRIPTS
  for name, value in re.findall(
      r'(labels_per_class|num_clients|cohort_size)=(\d+)', defaults(script)):
    FLAGS.set_default(name, int(value))
  parse(f'--flagfile={file}')
  lines = [line for line in file.read_text().splitlines()
           if line.startswith('--')]
  for line in lines:
    name, value = line[2:].split('=', 1)
    assert FLAGS[name].present, line
  assert FLAGS.cohort_size <= FLAGS.num_clients
  assert settings.seeds()
  methods.make(settings.method(), toy.task())
  augment.make_weak(FLAGS.weak)
  augment.make_weak(FLAGS.labeled_view or FLAGS.weak)
  augment.make_strong(FLAGS.strong)


@pytest.mark.parametrize('setting', ['iid', 'iiddir', 'dirdir'])
def test_feddure_has_every_cell_of_its_paper(setting):
  """Table 1 in two profiles, Table 2, and the grids of its figures."""
  found = {}
  for file in FLAGFILES:
    if file.name.startswith(f'cifar_{setting}.feddure'):
      FLAGS.unparse_flags()
      for name in ('method', 'alpha', 'labels_per_class', 'cohort_size'):
        FLAGS[name].present = 0
      parse(f'--flagfile={file}')
      found[file.name] = (FLAGS.dataset, FLAGS.method, FLAGS.alpha,
                          FLAGS.labels_per_class, FLAGS.cohort_size)
  cells = set(found.values())
  assert len(cells) == len(found)
  names = {'cifar10', 'fashion_mnist', 'cinic10'}
  plain = {c[0] for c in cells if c[1:] == ('feddure', 0.5, 500, 5)}
  official = {c[0] for c in cells if 'official' in c[1]}
  assert plain == official == names
  for row in ('fine', 'coarse', 'maml'):
    assert any(f"regulators='{row}'" in c[1] for c in cells)
  assert sum('averaged' in c[1] for c in cells) == 2
  mine = {c[2:] for c in cells if c[:2] == ('cifar10', 'feddure')}
  if setting != 'iid':
    assert {c[0] for c in mine} == {.3, .5, .7, 1}
    assert {c[1] for c in mine} == {100, 200, 500, 750, 1000}
  if setting == 'dirdir':
    for name in ('cifar10', 'fashion_mnist'):
      assert {c[4] for c in cells if c[0] == name} == {2, 5, 10, 20}
