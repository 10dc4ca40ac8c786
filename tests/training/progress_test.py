"""The speed shown is that after compilation."""
import io

import jax
import jax.numpy as jnp
import pytest

from fedjax_ssl.core import durations
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
  clock.now = 64.0
  shown.update(30, accuracy=0.5)
  messages = lines.getvalue().splitlines()
  assert messages[0] == 'run: compiling'
  assert messages[1].startswith('run: round 10/100') and 's/round' not in (
      messages[1])
  assert messages[2] == (
      'run: round 30/100, 0.2 s/round, 14s left, accuracy 0.5000')


@pytest.mark.parametrize('stream', [io.StringIO, Terminal])
def test_a_long_compilation_gives_one_sign_of_life(monkeypatch, stream):
  """And none once there is a round, or the run has ended."""
  monkeypatch.setattr(progress, '_LONG', 0.0)
  lines = stream()
  shown = progress.Progress('run', 100, stream=lines)
  shown._waiting.join()
  assert lines.getvalue().count('still compiling, or in a long round') == 1
  shown.update(1)
  shown.close()
  monkeypatch.setattr(progress, '_LONG', 600.0)
  for end in (lambda run: run.update(1), lambda run: run.close()):
    end(other := progress.Progress('run', 100, stream=stream()))
    other._waiting.join()  # It does not wait on.


def test_rate_leaves_out_what_is_compiled_later():
  clock, lines, compiled = Clock(), io.StringIO(), [60.0]
  shown = progress.Progress('run', 100, interval=0, stream=lines, clock=clock,
                            compiled=lambda: compiled[0])
  clock.now = 60.0
  shown.update(1)
  clock.now = 70.0  # The first evaluation: 9.5 s are its compilation.
  compiled[0] += 9.5
  shown.update(11)
  assert lines.getvalue().splitlines()[2] == (
      'run: round 11/100, 0.05 s/round, 4s left')


def test_compilation_is_counted_once_whenever_it_happens():
  compilation = progress.Compilation()
  for name, start, end in (
      ('jaxpr_trace_duration', 3, 4), ('jaxpr_trace_duration', 5, 6),
      ('jaxpr_trace_duration', 2, 7), ('backend_compile_duration', 7, 9)):
    compilation.hear(f'/jax/core/compile/{name}', start, end, fun_name='f')
  compilation.hear('/jax/checkpoint/write', 9, 100)
  assert compilation.seconds() == 7


def test_jax_tells_what_it_compiles():
  compilation = progress.Compilation()
  function = jax.jit(lambda x: jax.lax.fori_loop(
      0, 3, lambda i, y: jnp.tanh(y @ y) + i, x))
  told: dict[str, list[tuple[float, float]]] = {}
  def hear(event, start_time, end_time, **unused):
    told.setdefault(event, []).append((start_time, end_time))
  jax.monitoring.register_event_time_span_listener(hear)
  try:
    with compilation.listening():
      function(jnp.eye(3))
      first = compilation.seconds()
  finally:
    jax.monitoring.unregister_event_time_span_listener(hear)
  named = [f'/jax/core/compile/{name}_duration' for name in (
      'jaxpr_trace', 'jaxpr_to_mlir_module', 'backend_compile')]
  spans = [span for name in named for span in told[name]]
  starts, ends = zip(*spans, strict=True)
  assert 0 < max(end - start for start, end in spans) <= first + 1e-6
  assert first <= max(ends) - min(starts) + 1e-6
  with compilation.listening():
    function(jnp.eye(3))
    assert compilation.seconds() == first
  jax.jit(lambda x: x - 5)(jnp.eye(2))
  assert compilation.seconds() == first


def test_a_resumed_run_counts_its_own_rounds_only():
  clock, lines = Clock(), io.StringIO()
  shown = progress.Progress('run', 100, interval=0, start=50, stream=lines,
                            clock=clock)
  for now, round_ in ((5.0, 60), (15.0, 70)):
    clock.now = now
    shown.update(round_)
  assert lines.getvalue().splitlines()[-1] == (
      'run: round 70/100, 1 s/round, 30s left')


def test_lines_keep_their_distance_and_the_last_is_shown():
  clock, lines = Clock(), io.StringIO()
  shown = progress.Progress('run', 50, interval=10, stream=lines, clock=clock)
  for round_ in range(1, 51):
    clock.now += 1
    shown.update(round_)
  rounds = [int(line.split()[2].split('/')[0])
            for line in lines.getvalue().splitlines()[1:]]
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
  assert durations.text(seconds) == text
