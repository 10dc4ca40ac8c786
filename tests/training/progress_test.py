"""The speed shown is that after compilation."""
import io

import pytest

from fedjax_ssl.training import progress


class Clock:
  now = 0.0

  def __call__(self) -> float:
    return self.now


class Terminal(io.StringIO):
  def isatty(self) -> bool:
    return True


def test_rate_leaves_out_the_first_stretch():
  clock, lines = Clock(), io.StringIO()
  shown = progress.Progress('run', 100, interval=0, stream=lines, clock=clock)
  clock.now = 60.0  # Compilation and ten rounds.
  shown.update(10)
  assert shown.seconds_per_round is None
  clock.now = 64.0
  shown.update(30, accuracy=0.5)
  assert shown.seconds_per_round == pytest.approx(0.2)
  messages = lines.getvalue().splitlines()
  assert messages[0].startswith('run: round 10/100')
  assert messages[1] == (
      'run: round 30/100, 0.2 s/round, 14s left, accuracy 0.5000')


def test_a_resumed_run_counts_its_own_rounds_only():
  clock = Clock()
  shown = progress.Progress('run', 100, start=50, stream=io.StringIO(),
                            clock=clock)
  for now, round_ in ((5.0, 60), (15.0, 70)):
    clock.now = now
    shown.update(round_)
  assert shown.seconds_per_round == pytest.approx(1.0)


def test_lines_keep_their_distance_and_the_last_is_shown():
  clock, lines = Clock(), io.StringIO()
  shown = progress.Progress('run', 50, interval=10, stream=lines, clock=clock)
  for round_ in range(1, 51):
    clock.now += 1
    shown.update(round_)
  rounds = [int(line.split()[2].split('/')[0])
            for line in lines.getvalue().splitlines()]
  assert rounds == [1, 11, 21, 31, 41, 50]


def test_a_terminal_gets_a_bar_and_no_lines():
  terminal, clock = Terminal(), Clock()
  with progress.Progress('run', 20, stream=terminal, clock=clock) as shown:
    for round_ in (5, 10, 20):
      clock.now += 5
      shown.update(round_, accuracy=0.25)
  last = terminal.getvalue().split('\r')[-1]
  assert 'run 20/20' in last and 'accuracy 0.2500' in last
  assert '0.667 s/round' in last
  assert 'round 20/20' not in terminal.getvalue()


@pytest.mark.parametrize('seconds, text', [
    (0, '0s'), (59.4, '59s'), (59.6, '1m00s'), (3599.9, '1h00m'),
    (754, '12m34s'), (100_000, '27h46m')])
def test_durations(seconds, text):
  assert progress.duration(seconds) == text
