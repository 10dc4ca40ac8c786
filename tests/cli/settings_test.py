"""The flags by name, and the scripts' help."""
from __future__ import annotations

import dataclasses
import re

from absl.testing import flagsaver
import pytest

from fedjax_ssl import config
from fedjax_ssl.cli import train
from fedjax_ssl.core import checks
from fedjax_ssl.running import settings
from tests.cli import launcher

FLAGS = train.FLAGS
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
           if re.search(r'^  cli\.run_setting\(', p.read_text(), re.MULTILINE)]


@pytest.fixture(autouse=True)
def flag_values():
  saved = flagsaver.save_flag_values()
  yield
  flagsaver.restore_flag_values(saved)


def test_every_name_is_a_flag():
  assert set(NAMES) <= {*config.OPTIONS}
  for name in config.OPTIONS:
    assert FLAGS[checks.flag(name)].help


def test_choices():
  for name, values in {
      'labels': ['few', 'all'], 'labels_at': ['clients', 'server'],
      'norm': ['auto', 'none', 'batch', 'group', 'static'],
      'seed_map': ['auto', 'map', 'vmap'],
      'client_map': ['auto', 'map', 'vmap', 'lanes'],
      'aggregation_order': ['fixed', 'fast']}.items():
    parser = FLAGS[name].parser
    assert [*parser.enum_values] == values  # type: ignore[attr-defined]


def parse(*args: str) -> config.Config:
  FLAGS(['script', *args])
  return train.options()


def test_defaults_of_seeds_yield_to_the_command_line():
  FLAGS.set_default('seeds', ['0', '1'])
  assert parse().all_seeds == [0, 1]
  assert parse('--seed=7').all_seeds == [7]


def test_a_second_setting_has_flags_of_its_own():
  """Nothing is left of one that the same process has trained before."""
  for name, words in (
      ('digits_dirdir', ['--alpha=0.7', '--import=fedjax_ssl.losses']),
      ('cifar_iid', [])):
    with pytest.raises(SystemExit) as ended:
      train.main(settings.SETTINGS[name], [*words, 'no_flag'])
    assert ended.value.code == 2
    found = train.options(name)
  assert dataclasses.asdict(found) == settings.defaults_of('cifar_iid') | {
      'seeds': None}
  assert not any(FLAGS[checks.flag(name)].present for name in config.OPTIONS)


def test_several_seeds():
  assert parse('--seeds=3,1').all_seeds == [3, 1]


def test_a_fraction_beats_a_default_number_of_labels():
  FLAGS.set_default('labels_per_class', 10)
  told = parse('--labeled_fraction=0.1')
  assert told.labels_per_class is None and told.labeled_fraction == 0.1


def test_profile_becomes_a_knob():
  told = parse('--method=rscfed(beta=2)', '--profile=paper')
  assert told.full_method == "rscfed(beta=2, profile='paper')"
  again = dataclasses.replace(told, method=told.full_method)  # As it is stored.
  assert again.full_method == "rscfed(beta=2, profile='paper')"


def test_a_run_may_change_only_what_changes_no_bit():
  assert {*config.MAY_CHANGE} <= {*config.OPTIONS}
  assert not {*config.MAY_CHANGE} & {
      'method', 'model', 'seeds', 'alpha', 'learning_rate', 'chunk_size',
      'client_map', 'aggregation_order', 'conv_impl', 'compute_dtype'}


@pytest.mark.parametrize('script', SCRIPTS, ids=lambda p: p.stem)
def test_help(script, tmp_path):
  started = launcher.start(tmp_path / 'run', '--help', script=script)
  assert started.wait() == 0
  output = started.output()
  assert script.read_text().splitlines()[0].split('"""')[1][:40] in output
  for line in settings.SETTINGS[script.stem].text().splitlines():
    # With the source of what it copies.
    assert ' '.join(line.split()) in ' '.join(output.split())
  for name in NAMES:
    assert f'--{name}:' in output or f'--[no]{name}:' in output
  assert not (tmp_path / 'run').exists()
