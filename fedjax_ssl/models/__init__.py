"""Networks by name, as pure functions that are fast inside loops."""
from __future__ import annotations

from collections.abc import Callable
import inspect
from typing import Any, NamedTuple, TypeVar

from flax import linen as nn
import jax
import jax.numpy as jnp

from fedjax_ssl.core import checks, conv_forms, registry, types
from fedjax_ssl.models import (
  classic,
  last_layer,
  layers,
  own,
  resnet,
  resnet9,
  small,
  text,
)

FILLED = own.FILLED
_DTYPES = ('bfloat16', 'float32', 'float64')


class Facts(NamedTuple):
  """What a network expects of its inputs and of a run.

  Attributes:
    norm: default policy; 'none' with `fixed` means there is nothing to
      normalize.
    fixed: whether the network has no normalization layers.
    smallest: the least side of an image that gets through.
    channels: what preprocessing should deliver, or None for anything.
    side: the least side that preprocessing should deliver, or None.
    text: whether it reads texts instead of images.
  """

  norm: str = 'none'
  fixed: bool = False
  smallest: int = 1
  channels: int | None = None
  side: int | None = None
  text: bool = False


_Builder = TypeVar('_Builder', bound=Callable[..., Any])

MODELS: registry.Registry[Callable[..., nn.Module]] = registry.Registry(
    'model', {
    'alexnet': classic.alexnet,
    'cnn': small.cnn,
    'fedavg_cnn': classic.fedavg_cnn,
    'fedtrinet_cifar': classic.fedtrinet_cifar,
    'fedtrinet_mnist': classic.fedtrinet_mnist,
    'linear': small.linear,
    'mlp': small.mlp,
    'resnet18': resnet.resnet18,
    'resnet18_rscfed': resnet.resnet18_rscfed,
    'resnet34': resnet.resnet34,
    'resnet50': resnet.resnet50,
    'resnet8': resnet.resnet8,
    'resnet9': resnet9.resnet9,
    'resnet9_fedmatch': resnet9.resnet9_fedmatch,
    'simple_cnn': classic.simple_cnn,
    'text_cnn': text.text_cnn,
    'text_mean': text.text_mean,
    'wrn28_2': resnet.wrn28_2,
}, 'fedjax_ssl.models', own.builder)

_RESNET = Facts('batch', smallest=8, channels=3, side=32)
FACTS: dict[str, Facts] = {
    'alexnet': Facts(fixed=True, smallest=8, channels=3, side=32),
    'cnn': Facts(smallest=4),
    'fedavg_cnn': Facts(fixed=True, smallest=4),
    'fedtrinet_cifar': Facts('batch', smallest=8, channels=3, side=32),
    'fedtrinet_mnist': Facts(fixed=True, smallest=16, side=32),
    'linear': Facts(fixed=True),
    'mlp': Facts(fixed=True),
    'resnet18': _RESNET,
    'resnet18_rscfed': _RESNET,
    'resnet34': _RESNET,
    'resnet50': _RESNET,
    'resnet8': _RESNET,
    'resnet9': Facts('batch', smallest=32, channels=3, side=32),
    'resnet9_fedmatch': Facts(smallest=32, channels=3, side=32),
    'simple_cnn': Facts(fixed=True, smallest=16, channels=3, side=32),
    'text_cnn': Facts(fixed=True, text=True),
    'text_mean': Facts(fixed=True, text=True),
    'wrn28_2': _RESNET,
}


def register(name: str) -> Callable[[_Builder], _Builder]:
  """Decorates a Flax linen module's class, or a function that makes one.

  ```python
  @models.register('net')
  class Net(nn.Module):
    num_classes: int
    width: int = 8
  ```

  Fields are its knobs, as in `net(width=16)`; see `own.model` for how it is
  called, and `core.registry.register` for names.
  """
  return MODELS.register(name)


def input_needs(name: str) -> tuple[int | None, int | None]:
  """Returns what preprocessing must deliver to the model.

  Args:
    name: as in `make`.

  Returns:
    (channels, least side); None where anything goes.

  Raises:
    ValueError: for an unknown name.
  """
  _, facts = _known(name)
  return facts.channels, facts.side


def _known(text: str) -> tuple[str, Facts]:
  """Returns the plain name of a model, and its facts."""
  try:
    name, _ = registry.parse(text)
    registry.find(MODELS, name)
    return name, FACTS.get(name, Facts())
  except ValueError as error:
    raise checks.FieldError('model', text, str(error)) from None


def make(name: str, *, num_classes: int, norm: str | None = None,
         conv_impl: str = 'auto', dtype: str = 'float32',
         input_shape: tuple[int, ...]) -> types.Model:
  """Builds a model by name.

  Args:
    name: one of `MODELS`, with knobs if any, as in 'cnn(width=32)'.
    num_classes: C.
    norm: 'none', 'batch', 'group' or 'static', see `layers.Norm`; None is the
      model's own.
    conv_impl: see `conv.conv2d`.
    dtype: of the arithmetic: 'float32', 'bfloat16', or 'float64' where JAX has
      64-bit numbers enabled. Parameters and logits are float32 with the first
      two.
    input_shape: of one preprocessed input, (H, W, channels) for images; for
      texts (T,) of token ids or (T, E) of word vectors.

  Returns:
    The Model. Its `mask` may be None, for all rows.

  Raises:
    ValueError: for an unknown name, knob, norm, conv_impl or dtype, a norm
      that the model has no layers for, or images too small for it.
  """
  plain, facts = _known(name)
  given = norm
  norm = facts.norm if norm is None else checks.check('norm', norm,
                                                      layers.NORMS)
  if facts.fixed and norm != 'none':
    raise checks.FieldError('norm', norm, 'the model has no normalization '
                            'layers; allowed: none.', model=plain)
  conv_forms.by_layer(conv_impl)
  checks.check('dtype', dtype, _DTYPES)
  if dtype == 'float64' and not jax.config.read('jax_enable_x64'):
    raise ValueError("dtype is 'float64', which needs jax_enable_x64.")
  if num_classes < 1:
    raise ValueError(f'num_classes is {num_classes}; it must be 1 or more.')
  _check_shape(plain, facts, input_shape)
  if plain not in FACTS:
    return _own(name, tuple(input_shape), num_classes, given, conv_impl, dtype)
  module = registry.build('model', name, MODELS, num_classes=num_classes,
                          choices=layers.Choices(norm, conv_impl, dtype))
  has_tokens = facts.text and len(input_shape) == 1
  return _pure(module, tuple(input_shape), norm, has_tokens)


def _own(text: str, shape: tuple[int, ...], num_classes: int, norm: str | None,
         conv_impl: str, dtype: str) -> types.Model:
  """The Model of a user's own network, which may have none of our fields."""
  takes = inspect.signature(
      registry.find(MODELS, registry.parse(text)[0])).parameters
  if 'choices' not in takes:
    for name, value in (('norm', norm), ('conv_impl', conv_impl)):
      if value not in (None, 'auto', 'none'):
        raise checks.FieldError(name, value, 'the model has no field choices '
                                'and decides that itself; leave it out.',
                                model=text)
    if dtype != 'float32' and 'dtype' not in takes:
      raise checks.FieldError('compute_dtype', dtype, 'the model has no field '
                              'dtype; allowed: float32.', model=text)
  module = registry.build(
      'model', text, MODELS, num_classes=num_classes, dtype=jnp.dtype(dtype),
      choices=layers.Choices(norm or 'none', conv_impl, dtype))
  return own.model(text, module, shape, num_classes,
                   (norm or 'none') if 'choices' in takes else None)


def _check_shape(name: str, facts: Facts, shape: tuple[int, ...]) -> None:
  """Raises FieldError for inputs that the network does not take."""
  def refuse(takes: str) -> checks.FieldError:
    return checks.FieldError('model', name, f'takes {takes}; inputs here are '
                             f'of shape {shape}.')
  if facts.text and len(shape) not in (1, 2):
    raise refuse('texts: (tokens,) or (tokens, numbers)')
  if facts.smallest == 1:
    return
  if len(shape) != 3:
    raise refuse('images: (height, width, channels)')
  if min(shape[:2]) < facts.smallest:
    raise refuse(f'images of at least {facts.smallest}x{facts.smallest}')


def _pure(module: nn.Module, shape: tuple[int, ...], norm: str,
          has_tokens: bool) -> types.Model:
  """Returns the Flax module as a record of pure functions."""

  def init(key: jax.Array) -> types.Variables:
    dtype = jnp.int32 if has_tokens else jnp.float32
    made = module.init(key, jnp.zeros((1, *shape), dtype), train=False)
    return types.Variables(made['params'], made.get('stats', {}))

  def tree(variables: types.Variables) -> dict[str, Any]:
    return {'params': variables.params, 'stats': variables.stats}

  def finish(logits: Any) -> jax.Array:
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))

  def apply(variables: types.Variables, inputs: jax.Array) -> jax.Array:
    return finish(module.apply(tree(variables), inputs, train=False))

  def apply_train(variables: types.Variables, inputs: jax.Array,
                  mask: jax.Array | None, key: jax.Array | None = None
                  ) -> tuple[jax.Array, types.PyTree]:
    rngs = {} if key is None else {'dropout': key}
    logits, changed = module.apply(
        tree(variables), inputs, mask, train=True, mutable=['stats'],
        rngs=rngs)
    return finish(logits), changed.get('stats', {})

  def embed(variables: types.Variables, tokens: jax.Array) -> jax.Array:
    vectors: Any = module.apply(tree(variables), tokens, method='embed')
    return vectors

  return last_layer.with_features(types.Model(
      init, apply, apply_train, norm, embed if has_tokens else None))
