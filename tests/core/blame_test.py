"""Whatever a user's code raises is one line on the field that chose it."""
from __future__ import annotations

import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import models
from fedjax_ssl.cli import errors
from fedjax_ssl.core import blame, checks, optimizers
from fedjax_ssl.data import augment
from fedjax_ssl.methods.parts import attacks, server_optimizers

PARTS = """
    import flax.linen as nn
    import jax.numpy as jnp
    import numpy as np
    import optax

    from fedjax_ssl.core.types import Attack

    class Misspelt(nn.Module):
      num_classes: int
      @nn.compact
      def __call__(self, x):
        return nn.Dense(self.num_class)(x)

    class Fails(nn.Module):
      num_classes: int
      @nn.compact
      def __call__(self, x, train: bool):
        if train:
          raise KeyError('only then')
        return nn.Dense(self.num_classes)(x.reshape((x.shape[0], -1)))

    class Takes(nn.Module):
      num_classes: int
      @nn.compact
      def __call__(self, x, y):
        return x

    def number(*unused):
      return 1.0

    def nothing(*unused):
      pass

    def wide(horizon):
      return lambda round_: jnp.ones(3)

    def below(horizon):
      return lambda round_: 1.0 - round_

    def nan(horizon):
      return lambda round_: jnp.nan

    def between(horizon):
      return lambda round_: jnp.where(round_ == 1, jnp.inf, 1.0)

    def numpy(*, flip=True):
      return lambda key, images: np.asarray(images)

    def lost(horizon, *, factor=1.0):
      return lambda round_: factor * unknown

    def floats(*, flip=True):
      return lambda key, images: images.astype(jnp.float32)

    def low(*, rows=3):
      return lambda key, images: images[:, :rows]

    def alone(*, flip=True):
      return lambda images: images

    def stuck(rate):
      def update(*unused):
        raise TypeError('no step')
      return optax.GradientTransformation(lambda params: (), update)

    def lazy(rate):
      return optax.GradientTransformation(lambda params: (), lambda *unused: (
          None, ()))

    def hasty(rate):
      return optax.GradientTransformation(lambda params: (), lambda *unused: 3)

    def loud():
      return Attack(0.5, send=lambda message, key: {'x': jnp.zeros(3)})

    def many(*, share='0.5'):
      return Attack(share)

    def imaginary(horizon):
      return lambda round_: 1j

    def silent():
      def send(message, key):
        raise AttributeError('no word')
      return Attack(0.5, send=send)
    """
KEY, ROUND = jax.random.key(0), jnp.int32(0)
IMAGES = np.zeros((2, 4, 4, 1), np.uint8)


def network(text: str) -> None:
  made = models.make(text, num_classes=3, input_shape=(4, 4, 1))
  variables = made.init(KEY)
  made.apply_train(variables, jnp.zeros((2, 4, 4, 1)), None, KEY)


def schedule(text: str) -> None:
  optimizers.make('sgd', learning_rate=0.1, schedule=text, horizon=3
                  ).factor(ROUND)


def step(text: str) -> None:
  made = server_optimizers.make(text)
  assert made is not None
  given = {'x': jnp.zeros(2)}
  made.update(given, made.init(given))


def attack(text: str) -> None:
  made = attacks.make(text)
  assert made is not None and made.send is not None
  made.send({'x': jnp.zeros(2)}, KEY)


@pytest.fixture(scope='module')
def file(tmp_path_factory):
  made = tmp_path_factory.mktemp('own') / 'parts.py'
  made.write_text(textwrap.dedent(PARTS))
  return made


@pytest.mark.parametrize('use, field, name, words', [
    (network, 'model', 'Misspelt', 'AttributeError: .*"num_class".* (at 13'),
    (network, 'model', 'Fails', "KeyError: 'only then' (at 20"),
    (network, 'model', 'Takes', "TypeError: .*positional argument: 'y'"),
    (network, 'model', 'nothing', 'gives no Flax linen module but NoneType; '
     'does it end with return?'),
    (schedule, 'lr_schedule', 'number', 'gives no function (round) -> '
     'factor but float; does it'),
    (schedule, 'lr_schedule', 'wide', 'one number for a round, not float32[3]'),
    (schedule, 'lr_schedule', 'below', 'gives -1.0 in round 3; a factor is'),
    (schedule, 'lr_schedule', 'nan', 'gives nan in round 1; a factor is fin'),
    (schedule, 'lr_schedule', 'between', 'gives inf in round 2; a factor is'),
    (lambda text: jax.eval_shape(augment.make_weak(text), KEY, IMAGES), 'weak',
     'numpy', 'TracerArrayConversionError: .* (use jax.numpy in place of num'),
    (schedule, 'lr_schedule', 'lost', "NameError: name 'unknown'.* (at 51"),
    (schedule, 'lr_schedule', 'silent', 'is called with 1 argument besides'),
    (augment.make_weak, 'weak', 'nothing', 'gives no function (key, images) '
     '-> images but NoneType'),
    (lambda text: augment.make_weak(text)(KEY, IMAGES), 'weak', 'floats',
     'gives float32[2, 4, 4, 1], not uint8[2, 4, 4, 1]; a view gives'),
    (lambda text: augment.make_strong(text)(KEY, IMAGES), 'strong', 'low',
     'gives uint8[2, 3, 4, 1], not uint8[2, 4, 4, 1]; a view gives'),
    (lambda text: augment.make_weak(text, field='labeled_view')(KEY, IMAGES),
     'labeled_view', 'alone', 'TypeError: .* takes 1 positional argument'),
    (step, 'server_optimizer', 'number', 'gives no optax.GradientTransform'),
    (step, 'server_optimizer', 'stuck', 'TypeError: no step (at 64'),
    (step, 'server_optimizer', 'lazy', 'its update, for a step, gives None'),
    (step, 'server_optimizer', 'hasty', 'TypeError: cannot unpack'),
    (attack, 'attack', 'nothing', 'gives no Attack but NoneType; does it'),
    (attack, 'attack', 'number', 'gives no Attack but float; does it end'),
    (attack, 'attack', 'many', "gives share='0.5', which must be "),
    (attack, 'attack', 'loud', "its send gives ['x'] as float32[3], not "
     'float32[2]'),
    (attack, 'attack', 'silent', 'AttributeError: no word (at 85'),
    (schedule, 'lr_schedule', 'imaginary', 'one number for a round, not comp'),
    (lambda text: augment.make_strong(f'ra_mc(weak={text!r})')(KEY, IMAGES),
     'strong', 'alone', 'TypeError: .* takes 1 positional argument')])
def test_the_field_and_the_line_are_named(file, use, field, name, words):
  with pytest.raises(checks.FieldError) as caught:
    use(f'{file}:{name}')
  line = errors.line(caught.value, {})
  assert line.startswith((
      f'--{field}={file}:{name}: ',
      f"--{field}=ra_mc(weak='{file}:{name}'): --weak=")), line
  for part in words.replace('(at ', f'.*{file}:').split('.*'):
    assert part in line


def test_what_is_right_is_as_it_was(file):
  """A user's code runs as if nothing watched it."""
  view = augment.make_weak(f'{file}:low(rows=4)')
  np.testing.assert_array_equal(view(KEY, IMAGES), IMAGES)


def test_errors_of_the_library_keep_their_type():
  with pytest.raises(KeyError), blame.naming('weak', 'x', own=False):
    raise KeyError('of ours')
  with pytest.raises(checks.FieldError, match='weak=x: refused'), (
      blame.naming('weak', 'x', own=False)):
    raise ValueError('refused')


def test_a_knob_that_is_a_view_is_named_behind_its_view():
  view = augment.make_strong("ra_mc(weak='flip_crop(pad=9)', cutout=0)")
  with pytest.raises(checks.FieldError) as caught:
    view(KEY, IMAGES)
  assert errors.line(caught.value, {}).startswith(
      "--strong=ra_mc(weak='flip_crop(pad=9)', cutout=0): "
      '--weak=flip_crop(pad=9): pad=9 must lie in')


@pytest.mark.parametrize('error', [
    OSError('disk'), MemoryError(), jax.errors.JaxRuntimeError(
        'RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.')])
def test_faults_of_the_system_are_nobodys(error):
  with pytest.raises(type(error)), blame.naming('weak', 'x', own=True):
    raise error
