"""The help of a setting lists every flag once, by topic."""
import itertools

from absl import flags
import pytest

from fedjax_ssl import config
from fedjax_ssl.cli import flag_help, train
from fedjax_ssl.core import checks
from fedjax_ssl.running import settings


def test_every_option_has_one_topic():
  named = [*itertools.chain(*flag_help.TOPICS.values())]
  assert sorted(named) == sorted(config.OPTIONS)


@pytest.fixture
def defaults():
  """What a setting sets is the next test's default otherwise."""
  yield
  for name, option in config.OPTIONS.items():
    train.FLAGS.set_default(checks.flag(name), option.default)


@pytest.mark.parametrize('word', flag_help.WORDS)
def test_help_has_the_defaults_of_the_setting(capsys, defaults, word):
  setting = settings.SETTINGS['cifar_dirdir']
  with pytest.raises(SystemExit) as ended:
    train.main(setting, ['--method=fedavg', word])
  assert ended.value.code == 0
  out = capsys.readouterr().out
  assert out.startswith(setting.about)
  assert 'repeat this option' not in out
  said = [line.partition(':')[0].strip().replace('[no]', '')
          for line in out.splitlines() if line.startswith('  --')]
  assert said == ['--' + checks.flag(name) for name in
                  itertools.chain(*flag_help.TOPICS.values())]
  shown = out.partition('  --num_clients:')[2].partition('  --')[0]
  assert "(default: '100')" in shown
  assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize('words,asked', [
    ([], False), (['--nobounds', '-h'], True), (['--bounds', '-h'], True),
    (['--workdir', '-h'], False), (['--workdir=a', '-h'], True),
    (['--workdir', 'a', '--help'], True), (['--', '--help'], False),
    (['-method', '--help'], False), (['--no_flag', '--help'], True)])
def test_help_is_no_value_of_a_flag(words, asked):
  assert flag_help.is_asked(words, train.FLAGS) == asked


def test_flags_of_a_users_program_are_listed(capsys, defaults, monkeypatch):
  monkeypatch.setattr('sys.argv', ['mine.py'])
  flags.DEFINE_string('of_mine', 'x', 'What is mine.', module_name='mine.py')
  try:
    with pytest.raises(SystemExit):
      train.main(settings.SETTINGS['cifar_dirdir'], ['--help'])
  finally:
    delattr(train.FLAGS, 'of_mine')
  said = capsys.readouterr().out.partition('Of this program:')[2]
  assert said.splitlines()[1] == '  --of_mine: What is mine.'
