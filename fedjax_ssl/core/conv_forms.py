"""Names of the forms of convolutions: one for all layers, or one for each.

This module does not need JAX, as the options of a run are read without it.
"""
from __future__ import annotations

from collections.abc import Mapping
import functools
import re

from fedjax_ssl.core import checks

# Forms that a convolution has; 'auto' chooses by shape and backend.
FORMS = ('auto', 'gemm', 'lax', 'reordered', 'taps', 'winograd')
# Asks the programs to time the forms, and to store the fastest in its place.
MEASURE = 'measure'

_LAYER = re.compile(r'\d+x\d+/\d+ (SAME|VALID) \d+x\d+ \d+>\d+( pooled)?')


@functools.cache
def by_layer(text: str) -> Mapping[str, str]:
  """Reads the forms that were measured for each layer.

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
  """Returns the text that `by_layer` reads as these forms."""
  return '; '.join(f'{layer} {form}' for layer, form in forms.items())


def check(text: str) -> None:
  """Checks the option `conv_impl` of a run.

  Raises:
    FieldError: unless it is a form, `MEASURE`, or forms by layer.
  """
  known = (*FORMS, MEASURE)
  if ' ' in text:
    by_layer(text)
  elif text not in known:
    raise checks.FieldError('conv_impl', text, checks.unknown(text, known))
