"""Words for the form of convolutions: one for all, or one for each layer.

Read without JAX, by the options of a run.
"""
from __future__ import annotations

from collections.abc import Mapping
import functools
import re

from fedjax_ssl.core import checks

# Forms that a convolution has; 'auto' chooses by shape and backend.
FORMS = ('auto', 'gemm', 'lax', 'reordered', 'taps', 'winograd')
# The programs time the forms and store what is fastest in its place.
MEASURE = 'measure'

_LAYER = re.compile(r'\d+x\d+/\d+ (SAME|VALID) \d+x\d+ \d+>\d+')


@functools.cache
def by_layer(text: str) -> Mapping[str, str]:
  """Reads forms that were measured.

  Args:
    text: a layer, a space and its form, for each layer, joined by '; ', as in
      '3x3/1 SAME 32x32 64>128 gemm; 3x3/1 SAME 16x16 128>128 lax'.

  Returns:
    The form by layer; empty for a text that is one word.

  Raises:
    ValueError: if the text is neither.
  """
  if ' ' not in text:
    checks.check('conv_impl', text, FORMS)
    return {}
  found = {}
  for part in text.split('; '):
    layer, _, form = part.rpartition(' ')
    if not _LAYER.fullmatch(layer) or form not in FORMS:
      raise checks.FieldError(
          'conv_impl', text, f'{part!r} is no layer with its form, such as '
          "'3x3/1 SAME 32x32 64>128 gemm'.")
    found[layer] = form
  return found


def joined(forms: Mapping[str, str]) -> str:
  """The text that `by_layer` reads."""
  return '; '.join(f'{layer} {form}' for layer, form in forms.items())


def check(text: str) -> None:
  """Holds an option of a run to what it may be.

  Raises:
    FieldError: unless it is a form, `MEASURE`, or forms by layer.
  """
  known = (*FORMS, MEASURE)
  if ' ' in text:
    by_layer(text)
  elif text not in known:
    raise checks.FieldError('conv_impl', text, checks.unknown(text, known))
