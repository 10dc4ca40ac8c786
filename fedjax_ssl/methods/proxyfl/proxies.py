"""Class proxies of ProxyFL: contrast at the clients, tuning at the server.

Chen and Wang, ProxyFL, CVPR 2026, https://arxiv.org/abs/2602.21078.
"""
from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl import losses
from fedjax_ssl.aggregation import algebra
from fedjax_ssl.core.types import Array, Number


def contrast(features: Array, proxies: Array, probabilities: Array,
             sure: Array, prior: Array, mask: Array) -> jax.Array:
  r"""Computes ICPL: rows should be near their proxies, far from other classes.

  The classes of a row are :math:`\xi = \{\arg\max p\}` if it is sure, else all
  with :math:`p_c > P_c`. With f a row's feature and q a proxy, both of length
  1, its positive similarity is :math:`s = f \cdot \sum_{c \in \xi} p_c q_c`, or
  :math:`f \cdot q_\xi` if it is sure, and the loss
  :math:`-\log \frac{e^s}{e^s + \sum_j e^{f \cdot f_j}}` over the rows j that
  share no class with it and have a positive similarity to it.

  Args:
    features: float[B, F], projected, of any length.
    proxies: float[C, F], projected, of any length.
    probabilities: float[B, C], p; constants for derivatives.
    sure: float32[B], 1 for a sure row.
    prior: float32[C], P.
    mask: float32[B]; a masked row is no negative of others.

  Returns:
    float32[B].
  """
  p = lax.stop_gradient(jnp.asarray(probabilities))
  top = jax.nn.one_hot(p.argmax(-1), p.shape[-1], dtype=bool)
  likely = p > prior
  is_sure = (jnp.asarray(sure) > 0)[:, None]
  classes = jnp.where(is_sure, top, likely).astype(p.dtype)
  shares = jnp.where(is_sure, top, p * likely).astype(p.dtype)
  f, q = losses.unit_rows(features), losses.unit_rows(proxies)
  near = jnp.sum(f * jnp.matmul(
      shares, q, precision=lax.Precision.HIGHEST), -1)
  similarity = jnp.matmul(f, f.T, precision=lax.Precision.HIGHEST)
  apart = (classes @ classes.T == 0) & (similarity >= 1e-6) & (
      jnp.asarray(mask) > 0)
  gap = jnp.where(apart, similarity - near[:, None], 0)
  return jnp.log1p(jnp.sum(jnp.where(apart, jnp.exp(gap), 0), -1))


def margin(proxies: Array, most: Number = 100.0) -> jax.Array:
  """Computes the largest distance, float32[], of a proxy to its nearest one.

  It is cut to at most `most`.
  """
  gaps = _distances(proxies, proxies)
  others = ~jnp.eye(len(proxies), dtype=bool)
  nearest = jnp.min(gaps, -1, where=others, initial=jnp.inf)
  return jnp.minimum(jnp.max(nearest), most)


def tuned(mean: Array, sent: Array, weights: Array, key: jax.Array, *,
          epochs: int = 100, rate: float = 0.005, batch: int = 4,
          max_margin: float = 100.0) -> jax.Array:
  r"""Does GPT: moves global proxies so that clients' proxies are told apart.

  For each sent proxy w of class c, :math:`D_{c'} = \|w - \Omega_{c'}\|` is its
  distance to the global proxy of each class c', plus the `margin` of the mean
  if c' = c. Plain gradient descent minimises :math:`H(softmax(-D), c)` over
  shuffled batches of sent proxies.

  Args:
    mean: float[C, F], the averaged proxies.
    sent: float[M, C, F], those of each client.
    weights: float32[M]; a client of weight 0 sent nothing.
    key: shuffles.
    epochs: over all sent proxies; 0 leaves the mean.
    rate: learning rate.
    batch: sent proxies of a step.
    max_margin: the largest margin.

  Returns:
    float[C, F]; the mean if nobody sent anything.
  """
  num_clients, size, width = sent.shape
  # Clients that sent come first, so that the others do not change the draws.
  present = jnp.asarray(weights) > 0
  rows = jnp.where(present[:, None, None], sent, 0)[
      jnp.argsort(~present, stable=True)]
  rows = rows.reshape(-1, width)
  of_class = jnp.tile(jnp.arange(size), num_clients)
  count = present.sum() * size
  wide = margin(mean, max_margin)

  def loss(now: jax.Array, index: jax.Array, mask: jax.Array) -> jax.Array:
    label = of_class[index]
    gaps = _distances(rows[index], now) + wide * jax.nn.one_hot(label, size)
    return losses.cross_entropy(-gaps, label, mask)[0]

  def epoch(i: jax.Array, now: jax.Array) -> jax.Array:
    draw = jax.random.uniform(jax.random.fold_in(key, i), of_class.shape)
    order = jnp.argsort(jnp.where(jnp.arange(len(draw)) < count, draw, 2.0))

    def step(j: jax.Array, now: jax.Array) -> jax.Array:
      place = j * batch + jnp.arange(batch)
      index = jnp.take(order, place, mode='clip')
      gradient = jax.grad(loss)(
          now, index, (place < count).astype(jnp.float32))
      return now - rate * gradient
    return lax.fori_loop(0, (count + batch - 1) // batch, step, now)
  out: jax.Array = lax.fori_loop(0, epochs, epoch, jnp.asarray(mean))
  return out


def _distances(a: Array, b: Array) -> jax.Array:
  """Computes distances of rows, float[N, M]; derivative 0 for equal rows."""
  gaps = jnp.asarray(a)[:, None] - b
  # In a unit of each distance: squares of a hostile client's would overflow.
  unit = lax.stop_gradient(algebra.power_of_two(
      jnp.max(jnp.abs(gaps), -1, initial=0)))
  return unit * algebra.safe_sqrt(
      jnp.sum(jnp.square(gaps / unit[..., None]), -1))
