"""Networks of the user's own: any Flax module as a record of pure functions."""
from __future__ import annotations

from collections.abc import Callable
import contextlib
import dataclasses
import functools
import inspect
from typing import Any
import warnings

from flax import linen as nn
import jax
import jax.numpy as jnp

from fedjax_ssl.core import blame, checks, types
from fedjax_ssl.models import last_layer

# Fields that the library fills in itself, where a module has them.
FILLED = ('num_classes', 'choices', 'dtype')
_WORDS = {'train', 'training', 'deterministic'}  # Whether a module trains.
_LITERALS = (bool, int, float, str, type(None), tuple)


def builder(given: Any) -> Callable[..., nn.Module]:
  """Makes a builder of a Flax module's class; a function is one already.

  Args:
    given: a class, whose fields become knobs if their defaults are literals;
      `num_classes`, `dtype` and `choices` are filled in. Or a function with
      keyword-only knobs that returns a module.

  Returns:
    The builder. Its knobs are keyword-only parameters.

  Raises:
    ValueError: for anything else.
  """
  if not (isinstance(given, type) and issubclass(given, nn.Module)):
    if isinstance(given, type) or not callable(given):
      kinds = inspect.getmro(given) if isinstance(given, type) else ()
      nnx = any(kind.__module__.startswith('flax.nnx') for kind in kinds)
      raise ValueError(f'{getattr(given, "__name__", given)!r} is no Flax '
                       'linen module class and no function that returns a '
                       'module.'
                       + (' Those of nnx are not taken.' if nnx else ''))
    return given

  def build(**knobs: Any) -> nn.Module:
    return given(**knobs)

  parameters = [
      inspect.Parameter(
          field.name, inspect.Parameter.KEYWORD_ONLY, annotation=field.type,
          default=inspect.Parameter.empty
          if field.default is dataclasses.MISSING or field.name in FILLED
          else field.default)
      for field in dataclasses.fields(given)
      if field.init and field.name not in ('parent', 'name')
      and (field.name in FILLED or _is_knob(field))]
  build.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
  written = inspect.getdoc(given) or ''
  if written.startswith(f'{given.__name__}('):
    written = ''  # A dataclass without a docstring has its signature as one.
  build.__module__, build.__doc__ = given.__module__, written
  build.__name__, build.__qualname__ = given.__name__, given.__qualname__
  return build


def _is_knob(field: dataclasses.Field[Any]) -> bool:
  """Returns whether a text can give a field; others keep their defaults."""
  if field.default is not dataclasses.MISSING:
    return isinstance(field.default, _LITERALS)
  return field.default_factory is dataclasses.MISSING


def _without_dropout(call: Callable[..., Any], args: tuple[Any, ...],
                     named: dict[str, Any],
                     context: nn.module.InterceptorContext) -> Any:
  """Lets layers of dropout return their input."""
  if isinstance(context.module, nn.Dropout) and (
      context.method_name == '__call__'):
    return args[0] if args else named['inputs']
  return call(*args, **named)


def _accepts(module: nn.Module, zeros: jax.Array, words: dict[str, Any]
             ) -> bool:
  """Returns whether a module that takes any words hands none of these on."""
  try:
    jax.eval_shape(lambda key: module.init(key, zeros, **words),
                   jax.random.key(0))
  except Exception:  # Whatever the user's code raises.
    return False
  return True


def _is_at_rest(apply_train: Callable[..., Any], variables: types.Variables,
                inputs: jax.Array) -> bool:
  """Returns whether training hands on the batch statistics that it gets."""
  stats, tree = jax.tree.flatten(variables.stats.get('batch_stats', {}))
  if not stats:
    return False

  def training(stats: list[jax.Array], rest: types.Variables) -> Any:
    given = {**rest.stats, 'batch_stats': jax.tree.unflatten(tree, stats)}
    _, after = apply_train(rest._replace(stats=given), inputs,
                           jnp.ones(inputs.shape[0]), jax.random.key(0))
    return after['batch_stats']

  try:
    made = jax.make_jaxpr(training)(stats, variables).jaxpr
  except Exception:  # Of the user's code, which says so where it trains.
    return False
  before = made.invars[:len(stats)]
  return all(any(one is other for other in before) for one in made.outvars)


def model(text: str, module: Any, shape: tuple[int, ...], num_classes: int,
          norm: str | None) -> types.Model:
  """Makes a record of pure functions from a module.

  The module is called with `train`, `training` and `mask` (float32[B], 0 for
  padding) if it takes them, and with `deterministic`, the opposite of `train`.
  One that takes `**words` gets each of these three that it can be called with.
  All its collections besides `params`, such as `batch_stats`, are statistics.
  Batch statistics leave padding out only if the module hands `mask` to its
  layers. If the module returns the output of an `nn.Dense`, the model has
  features: the input of that layer.

  Args:
    text: as the user gave it, for messages.
    module: what the builder returned.
    shape: of one input.
    num_classes: C.
    norm: policy of a module built of `models.layers`; None is 'batch' if the
      module has statistics, else 'none'.

  Raises:
    FieldError: if it is no module, fails, or its logits have another shape.
  """
  blame.check('model', text, module, isinstance(module, nn.Module),
              'Flax linen module')
  takes = inspect.signature(type(module).__call__).parameters
  zeros = jnp.zeros((1, *shape), jnp.int32 if len(shape) == 1 else jnp.float32)

  def words(train: bool, mask: jax.Array | None = None) -> dict[str, Any]:
    given = {'train': train, 'training': train, 'deterministic': not train,
             'mask': mask}
    return {name: value for name, value in given.items() if name in known}

  known = {*takes}
  if any(each.kind is each.VAR_KEYWORD for each in takes.values()):
    known |= {word for word in _WORDS if _accepts(module, zeros, {
        **words(False), word: word == 'deterministic'})}

  def init(key: jax.Array) -> types.Variables:
    made = dict(module.init(key, zeros, **words(False)))
    return types.Variables(made.pop('params', {}), made)

  def finish(logits: Any) -> Any:
    if not hasattr(logits, 'astype'):  # Refused below.
      return logits
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))

  def plainly(variables: types.Variables, inputs: jax.Array) -> Any:
    return module.apply({'params': variables.params, **variables.stats},
                        inputs, **words(False))

  def apply(variables: types.Variables, inputs: jax.Array) -> jax.Array:
    return finish(plainly(variables, inputs))

  def apply_train(variables: types.Variables, inputs: jax.Array,
                  mask: jax.Array | None, key: jax.Array | None = None
                  ) -> tuple[jax.Array, types.PyTree]:
    stats = variables.stats
    if key is None and not stats:
      return apply(variables, inputs), stats
    with (contextlib.nullcontext() if key is not None
          else nn.intercept_methods(_without_dropout)):
      logits, changed = module.apply(
          {'params': variables.params, **stats}, inputs, **words(True, mask),
          mutable=list(stats), rngs={} if key is None else {'dropout': key})
    return finish(logits), {**stats, **changed}

  named: Any = functools.partial(blame.named, 'model', text, own=True)
  init, apply, apply_train = map(named, (init, apply, apply_train))
  made = jax.eval_shape(init, jax.random.key(0))
  try:
    logits = jax.eval_shape(apply, made, zeros)
  except checks.FieldError as error:  # As dropout that is always on.
    raise checks.FieldError('model', text, 'cannot be called to predict: '
                            f'{error.reason}') from error.__cause__
  if not isinstance(logits, jax.ShapeDtypeStruct):
    raise checks.FieldError(
        'model', text, f'gives {type(logits).__name__}; it must give logits '
        f'[1, {num_classes}] alone.')
  if logits.shape != (1, num_classes):
    raise checks.FieldError(
        'model', text, f'gives {list(logits.shape)} for one input of '
        f'{list(shape)}; it must give logits [1, {num_classes}], as a field '
        'num_classes lets it.')
  if _is_at_rest(apply_train, made, jnp.tile(zeros, (2, *[1] * len(shape)))):
    advice = '' if known & _WORDS else (
        ' Give its __call__ an argument `train`, as in '
        'nn.BatchNorm(use_running_average=not train).')
    warnings.warn(f'model={text}: its batch_stats stay as they are in '
                  f'training.{advice}', stacklevel=2)
  plain = types.Model(init, apply, apply_train,
                      norm or ('batch' if made.stats else 'none'))
  if not last_layer.ends_dense(plainly, made, zeros):
    return plain
  return last_layer.with_features(plain)
