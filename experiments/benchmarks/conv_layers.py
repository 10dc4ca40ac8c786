r"""Milliseconds of every convolution of a network, in each form that it has.

Clients have weights of their own, stacked, and take local steps in a loop,
one client after another or all together, as a round on this backend does: layer
by layer a step of plain gradients (y, dx, dw), and one of gradients through a
gradient, as FedDure takes. A first layer's pixels need no gradient. All on one
device.

`error` says how exact a form is: how far its y, dx or dw, the worst of them, is
from that of a direct convolution in float32 at the highest precision, relative
in the Euclidean norm. About 1e-7 is float32, 1e-3 TF32 or bfloat16; 0 is that
very convolution.

What the last lines say of `auto` is what `conv.choose` should follow on this
machine. The work is that of a direct convolution, as in `limit`.

A run of some layers or forms has a file of its own, named by them; until the
last layer is timed its name ends in `_unfinished`. So neither replaces a whole
one.

python experiments/benchmarks/conv_layers.py
python experiments/benchmarks/conv_layers.py --model=resnet9_fedmatch \
    --compute_dtype=bfloat16
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import pathlib
import sys
import time
from typing import Any, NamedTuple

from absl import flags
from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.benchmarks import conv_table, harness, limit
import fedjax_ssl as fssl
from fedjax_ssl.core import checks
from fedjax_ssl.models import layers
from fedjax_ssl.ops import conv

FLAGS = flags.FLAGS

flags.DEFINE_string('model', 'fedavg_cnn', 'Network.')
flags.DEFINE_list('layers', [], 'Only these, by name; none: all.')
flags.DEFINE_list('forms', [name for name in conv.IMPLS if name != 'auto'],
                  'Forms beside auto.')
flags.DEFINE_integer('side', 0, "Of the images; 0: the network's own.",
                     lower_bound=0)
flags.DEFINE_integer('clients', 5, 'Clients, each with its own weights.',
                     lower_bound=1)
flags.DEFINE_integer('batch', 20, 'Rows of a local step.', lower_bound=1)
flags.DEFINE_integer('steps', 4, 'Local steps of one call.', lower_bound=2)
flags.DEFINE_enum('client_map', 'auto', ['auto', 'vmap', 'map'],
                  'Clients together, or one after another; auto: as rounds on '
                  'this backend.')
flags.DEFINE_enum('compute_dtype', 'float32', ['float32', 'bfloat16'],
                  'Of the arithmetic, and of the limit.')
harness.define_seconds('most_seconds', 2, 'What takes longer is called once '
                       'and not timed again.')

QUICK = {'model': 'cnn(width=2)', 'side': 8, 'clients': 2, 'batch': 2,
         'steps': 2}
_RATE = 0.1
_FAILURES = (jax.errors.JaxRuntimeError, MemoryError, NotImplementedError,
             TypeError, ValueError)


class Layer(NamedTuple):
  """One convolution.

  Attributes:
    shape: (H, W, I) of its input.
    module: as the network has it, with its pooling, without its bias.
    pixels: whether it reads the network's input, which needs no gradient.
  """

  shape: tuple[int, ...]
  module: layers.Conv
  pixels: bool

  def describe(self) -> dict[str, Any]:
    """What JSON can hold of it."""
    return {'shape': self.shape, 'pixels': self.pixels, **{
        name: getattr(self.module, name)
        for name in ('features', 'kernel', 'stride', 'padding', 'pool')}}


def layers_of(model: str, shape: tuple[int, ...]) -> dict[Layer, str]:
  """The convolutions of a network, in the order of its forward pass.

  Args:
    model: its name.
    shape: (H, W, I) of one input.

  Returns:
    The layers and their names, those of equal layers joined.

  Raises:
    ValueError: if there is none.
  """
  found: dict[Layer, list[str]] = {}
  def note(function, args, kwargs, context):
    module = context.module
    if isinstance(module, layers.Conv) and context.method_name == '__call__':
      plain = module.clone(parent=None, name=None, use_bias=False)
      layer = Layer(args[0].shape[1:], plain, pixels=not found)
      found.setdefault(layer, []).append('/'.join(module.path))
    return function(*args, **kwargs)
  made = fssl.make_model(model, num_classes=10, input_shape=shape)
  with nn.intercept_methods(note):
    jax.eval_shape(made.init, jax.random.key(0))
  if not found:
    raise ValueError(f'--model={model} has no convolution.')
  return {layer: ', '.join(same) for layer, same in found.items()}


def chosen(found: Mapping[Layer, str]) -> dict[Layer, str]:
  """Those of --layers, or all.

  Raises:
    ValueError: for a name that no layer has.
  """
  wanted = set(FLAGS.layers)
  known = {layer: set(text.split(', ')) for layer, text in found.items()}
  unknown = wanted.difference(*known.values())
  if unknown:
    raise ValueError(f'--layers={",".join(FLAGS.layers)}: the layers of '
                     f'{FLAGS.model} are {", ".join(found.values())}.')
  return {layer: text for layer, text in found.items()
          if not wanted or wanted & known[layer]}


def forward_of(layer: Layer, impl: str, dtype: str
               ) -> Callable[[jax.Array, jax.Array], Any]:
  """(x, w) -> y of one client; see `step_of`."""
  module = layer.module.clone(choices=layers.Choices('none', impl, dtype))
  return lambda x, w: module.apply({'params': {'kernel': w}}, x)


def step_of(layer: Layer, order: str, impl: str, dtype: str
            ) -> Callable[[jax.Array, jax.Array], tuple[Any, Any]]:
  """(x, w) -> (dx, dw) of one client's step; dx is 0 where none is needed.

  The loss is the output's mean square, so that y, dx and dw depend on both.

  Args:
    layer: the convolution.
    order: 'first', or 'second' for a gradient through one.
    impl: see `conv.conv2d`.
    dtype: of the arithmetic.
  """
  forward = forward_of(layer, impl, dtype)
  def loss(x, w):
    return jnp.square(forward(x, w).astype(jnp.float32)).mean() / 2
  def gradients(function, x, w):
    if layer.pixels:
      return 0.0, jax.grad(function, 1)(x, w)
    return jax.grad(function, (0, 1))(x, w)
  def moved(x, w):
    dx, dw = gradients(loss, x, w)
    return loss(_move(x, dx), _move(w, dw))
  return lambda x, w: gradients(loss if order == 'first' else moved, x, w)


def _move(x: jax.Array, dx: Any) -> jax.Array:
  return (x - _RATE * dx).astype(x.dtype)


def client_map() -> str:
  """--client_map, with 'auto' as a task has it on this backend."""
  return fssl.make_task(fssl.TaskSpec(
      2, (1, 1, 1), model='linear', mean=(0.0,), std=(1.0,), weak='none',
      strong='none', client_map=FLAGS.client_map)).client_map


def round_of(layer: Layer, order: str, impl: str
             ) -> Callable[[jax.Array, jax.Array], Any]:
  """--steps steps of all clients, x [S, B, H, W, I] and w [S, k, k, I, O]."""
  gradients = step_of(layer, order, impl, FLAGS.compute_dtype)
  def client(x, w):
    def step(_, carry):
      x, w = carry
      dx, dw = gradients(x, w)
      # Pixels change too, or what is made of them would leave the loop.
      return _move(x, 0.01 * x if layer.pixels else dx), _move(w, dw)
    return lax.fori_loop(0, FLAGS.steps, step, (x, w))
  if client_map() == 'vmap':
    return jax.vmap(client)
  return lambda x, w: lax.map(lambda both: client(*both), (x, w))


def arguments(layer: Layer) -> tuple[jax.Array, jax.Array]:
  """Inputs and weights of all clients."""
  kernel, features = layer.module.kernel, layer.module.features
  shapes = ((FLAGS.batch, *layer.shape),
            (kernel, kernel, layer.shape[2], features))
  x, w = (jax.random.normal(jax.random.key(i), (FLAGS.clients, *shape))
          for i, shape in enumerate(shapes))
  fan_in = kernel**2 * layer.shape[2]
  return x.astype(FLAGS.compute_dtype), w / fan_in**0.5


def flops(layer: Layer) -> dict[str, float]:
  """Operations of all clients' direct convolutions in a step, by order."""
  x, w = (jax.ShapeDtypeStruct(a.shape[1:], a.dtype)
          for a in jax.eval_shape(lambda: arguments(layer)))
  return {order: FLAGS.clients * limit.count(jax.make_jaxpr(
      step_of(layer, order, 'lax', FLAGS.compute_dtype))(x, w))
          for order in conv_table.ORDERS}


def forms(layer: Layer, x: jax.Array, w: jax.Array
          ) -> dict[tuple[str, ...], str | Exception]:
  """The names of --forms that are one program, with 'auto' among them.

  Returns:
    By group: the name to make it by, or why it cannot be made.
  """
  groups: dict[str, list[str]] = {}
  failed: dict[tuple[str, ...], str | Exception] = {}
  for impl in dict.fromkeys(('auto', *FLAGS.forms)):
    try:
      made = round_of(layer, 'first', impl)
      groups.setdefault(jax.jit(made).lower(x, w).as_text(), []).append(impl)
    except _FAILURES as error:
      failed[impl,] = error
  return {**{tuple(same): same[0] for same in groups.values()}, **failed}


def attempt(make: Callable[[], Callable[[], Any]]
            ) -> tuple[Callable[[], Any] | None, float, str]:
  """Makes a program and calls it.

  Returns:
    The call, seconds, and an empty text; or None, 0 and what went wrong.
  """
  try:
    call = make()
    start = time.perf_counter()
    call()
    return call, time.perf_counter() - start, ''
  except _FAILURES as error:
    return None, 0.0, ' '.join(str(error).split()) or type(error).__name__


def exact(layer: Layer, x: jax.Array, w: jax.Array) -> list[np.ndarray]:
  """`outputs` at the highest precision, of x and w as they are stored."""
  with jax.default_matmul_precision('highest'):
    return outputs(layer, 'lax', 'float32', x.astype(jnp.float32), w)


def outputs(layer: Layer, impl: str, dtype: str, x: jax.Array, w: jax.Array
            ) -> list[np.ndarray]:
  """y, then dx, if it is needed, and dw of a client's step without pooling.

  Rounding changes which of two nearly equal pixels a pooling takes, and with
  it whole entries of the gradients, however exact a form is.
  """
  smooth = layer._replace(module=layer.module.clone(pool=False))
  forward = forward_of(layer, impl, dtype)
  gradients = step_of(smooth, 'first', impl, dtype)
  y, found = jax.jit(lambda x, w: (forward(x, w), gradients(x, w)))(x, w)
  return [np.asarray(a, np.float64) for a in (y, *found[layer.pixels:])]


def difference(got: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> float:
  """The largest relative distance, in the Euclidean norm."""
  return max(float(np.linalg.norm(a - b) / np.linalg.norm(b))
             for a, b in zip(got, want, strict=True))


def measure(layer: Layer, products: limit.Products) -> dict[str, Any]:
  """Times all forms of a layer, in turns with the products.

  Returns:
    'rate', operations a second of the products; 'flops' by order; 'forms', by
    label: 'auto', whether it is that one; 'difference', see there, or None;
    and by order 'seconds' a step, float[calls], or 'error'.
  """
  work = flops(layer)
  x, w = arguments(layer)
  want = exact(layer, x[0], w[0])
  found: dict[str, dict[str, Any]] = {}
  calls: dict[str, Callable[[], Any]] = {}
  for same, impl in forms(layer, x, w).items():
    name = conv_table.label(same)
    found[name] = {'auto': 'auto' in same, 'difference': None}
    for order in conv_table.ORDERS:
      def make(order=order, impl=impl):
        if isinstance(impl, Exception):
          raise impl
        program = jax.jit(round_of(layer, order, impl)).lower(x, w).compile()
        return lambda: jax.block_until_ready(program(x, w))
      call, seconds, error = attempt(make)
      if call is None:
        found[name][order] = {'error': error}
      elif seconds > FLAGS.most_seconds:
        found[name][order] = {'seconds': [seconds / FLAGS.steps]}
      else:
        calls[f'{name} {order}'] = call
    if 'error' not in found[name].get('first', {}):
      assert isinstance(impl, str)
      found[name]['difference'] = difference(
          outputs(layer, impl, FLAGS.compute_dtype, x[0], w[0]), want)
  timed = harness.interleave({**calls, **products.runs})
  for key in calls:
    name, order = key.split()
    found[name][order] = {
        'seconds': [s / FLAGS.steps for s in timed[key]]}
  return {'rate': products.rate(harness.medians(timed)),
          'flops': work, 'forms': found}


def main() -> None:
  """Times all layers and reports."""
  for form in FLAGS.forms:
    checks.check('forms', form, conv.IMPLS)
  shape = harness.image_shape(FLAGS.model, FLAGS.side)
  products = limit.Products(None, FLAGS.compute_dtype, FLAGS.product_size)
  table: list[list[Any]] = [conv_table.HEADER]
  measured: dict[str, Any] = {}
  name = conv_table.file_name(
      [FLAGS.model.partition('(')[0], client_map(), FLAGS.compute_dtype],
      FLAGS.layers, FLAGS.forms)
  saved = (table, {
      'data': 'random numbers', 'backend': jax.default_backend(),
      'clients': FLAGS.clients, 'batch': FLAGS.batch, 'steps': FLAGS.steps,
      'layers': measured})
  for layer, title in chosen(layers_of(FLAGS.model, shape)).items():
    about = layer.describe()
    print(title, *(f'{key}={value}' for key, value in about.items()),
          flush=True)
    measured[title] = {'layer': about, **measure(layer, products)}
    table += conv_table.rows_of(title, measured[title])
    # What is cut off keeps the layers before, and leaves what was there.
    unfinished = harness.save(f'{name}_unfinished', *saved)
  harness.report(name, *saved)
  unfinished.unlink()
  print(f'auto on {jax.default_backend()} takes')
  for title, found in measured.items():
    print(f'  {conv_table.verdict(title, found)}')


if __name__ == '__main__':
  harness.run(main, QUICK)
