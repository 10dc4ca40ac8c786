r"""Precomputes BERT's token vectors of a CSV of texts, for --embeddings.

fedjax-ssl embed-texts --texts=DIR/tweets_sentiment140_subset.csv \
    --bert=FOLDER --out=DIR/tweets_bert.npz

FOLDER holds a model and its tokenizer as `save_pretrained` of the package
transformers writes them; nothing is downloaded. Needs the extra [text]. The
vectors take 2 bytes x texts x 40 x the model's width: 0.8 GB for 13,025 texts
of 768; --size keeps the strongest principal directions only.
"""
from __future__ import annotations

import argparse
from collections.abc import Sequence
import io
import math
import pathlib
import sys
from typing import Any

import numpy as np

from fedjax_ssl import data
from fedjax_ssl.cli import arguments, exit_codes
from fedjax_ssl.core import disk


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
  parser = arguments.Parser('embed-texts', __doc__)
  parser.add_argument('--texts', type=pathlib.Path, required=True,
                      help='CSV with the columns text and label')
  parser.add_argument('--bert', type=pathlib.Path, required=True,
                      help='folder of the model and its tokenizer')
  parser.add_argument('--out', type=pathlib.Path, required=True,
                      help='the .npz to write')
  parser.add_argument('--tokens', type=int,
                      default=data.datasets.tokens.MAX_TOKENS,
                      help='positions a text, special ones not counted')
  parser.add_argument('--batch', type=int, default=64, help='texts at a time')
  parser.add_argument('--size', type=int, default=0,
                      help='principal components to keep; 0: all numbers')
  found = parser.parse_args(argv)
  for name, least in (('tokens', 1), ('batch', 1), ('size', 0)):
    if getattr(found, name) < least:
      parser.error(
          f'--{name}={getattr(found, name)} must be at least {least}')
  parser.check_out(found.out, '.npz')
  return found


def embed(texts: Sequence[str], folder: pathlib.Path, *, tokens: int,
          batch: int, size: int = 0) -> np.ndarray:
  """Computes the last layer's vectors of texts' tokens, zeros after the end.

  Args:
    texts: D of them.
    folder: of the model and its tokenizer.
    tokens: T; tokens beyond it, and the special ones, are dropped.
    batch: texts at a time.
    size: numbers of a vector that `shorten` will keep, at most E.

  Returns:
    float16[D, T, E].

  Raises:
    ValueError: if the model reads fewer tokens, or has fewer numbers.
  """
  import torch
  import transformers
  if not folder.is_dir():
    raise ValueError(f'--bert={folder} is no folder.')
  tokenizer = transformers.AutoTokenizer.from_pretrained(
      folder, local_files_only=True)
  model: Any = transformers.AutoModel.from_pretrained(
      folder, local_files_only=True).eval()
  width = getattr(model.config, 'hidden_size', math.inf)
  if size > width:
    raise ValueError(f'--size={size} is more than the {width} numbers of the '
                     'model.')
  most = (getattr(model.config, 'max_position_embeddings', None) or math.inf
          ) - tokenizer.num_special_tokens_to_add()
  if tokens > most:
    raise ValueError(f'--tokens={tokens} is more than the {most} that the '
                     'model reads.')
  parts = []
  with torch.no_grad():
    for start in range(0, len(texts), batch):
      fed = tokenizer(
          list(texts[start:start + batch]), truncation=True, max_length=tokens
          + tokenizer.num_special_tokens_to_add(), padding='max_length',
          return_tensors='pt', return_special_tokens_mask=True)
      special = fed.pop('special_tokens_mask').numpy() > 0
      vectors = model(**fed).last_hidden_state.numpy()
      parts.append(_without(vectors, special, tokens))
  return np.concatenate(parts)


def _without(vectors: np.ndarray, special: np.ndarray, tokens: int
             ) -> np.ndarray:
  """Drops special tokens: float16[B, T, E], other tokens moved to the front."""
  order = np.argsort(special, axis=1, kind='stable')[:, :tokens]
  kept = np.take_along_axis(vectors, order[..., None], 1)
  real = ~np.take_along_axis(special, order, 1)
  return np.where(real[..., None], kept, 0).astype(np.float16)


def shorten(vectors: np.ndarray, size: int) -> np.ndarray:
  """Projects on the principal directions; zero vectors stay zero.

  Args:
    vectors: float16[D, T, E].
    size: directions kept, at most E; vectors are not centered.

  Returns:
    float16[D, T, size].
  """
  flat = vectors.reshape(-1, vectors.shape[-1])
  moment = np.zeros((flat.shape[1],) * 2)
  for rows in np.array_split(flat, max(len(flat) // 65_536, 1)):
    rows = rows.astype(np.float64)
    moment += rows.T @ rows
  _, directions = np.linalg.eigh(moment)
  best = directions[:, ::-1][:, :size].astype(np.float32)
  return np.stack([(x.astype(np.float32) @ best).astype(np.float16)
                   for x in vectors])


@arguments.refusing
def main(argv: Sequence[str]) -> int:
  """Reads texts, embeds them and writes vectors; returns the exit code."""
  asked = _arguments(argv)
  try:
    texts = data.datasets.text.read_rows(asked.texts).texts
    vectors = embed(texts, asked.bert, tokens=asked.tokens, batch=asked.batch,
                    size=asked.size)
    if asked.size:
      vectors = shorten(vectors, asked.size)
    file = io.BytesIO()  # Hours of work do not end in half a file.
    np.savez_compressed(file, texts=vectors,
                        sha256=np.array(data.datasets.text.fingerprint(texts)))
    disk.replace(asked.out, file.getvalue())
  except ImportError as error:
    print(f"error: {error.name} is missing: pip install -e '.[text]' in this "
          "repository's folder.", file=sys.stderr)
    return exit_codes.REFUSED
  print(f'{asked.out}: {vectors.dtype}{list(vectors.shape)}')
  return 0
