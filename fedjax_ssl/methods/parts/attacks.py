"""Clients that attack, for studies of robustness.

A fixed share of the clients is hostile from the first round to the last. The
seed of the run decides which, and no method is told. Numbers that a client
sends beside its model (`Update.counts`) are sent as they are; those that count
labels count the flipped ones under `label_flip`.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_ssl.core import blame, checks, knobs, registry, tree
from fedjax_ssl.core.types import Attack, Client, PyTree, Update

_SHARE = knobs.Bound(0, 1, cases=(knobs.at(0, 'nobody attacks'),))
_SCALE = knobs.Bound(above=True)


def none() -> None:
  """Nobody attacks."""


@knobs.checked(share=_SHARE)
def label_flip(*, share: float = 0.2) -> Attack:
  """Hostile clients learn class C - 1 - c where their label says c.

  Fang et al., Local Model Poisoning Attacks to Byzantine-Robust Federated
  Learning, USENIX Security 2020, https://arxiv.org/abs/1911.11815. A
  hostile client without labels does no harm; where no client has any, at
  labels_at='server', this is refused.

  Args:
    share: of all clients, rounded to the nearest number of them.
  """
  return Attack(share, flips_labels=True)


@knobs.checked(share=_SHARE, scale=_SCALE)
def sign_flip(*, share: float = 0.2, scale: float = 4.0) -> Attack:
  """Hostile clients send the opposite of their update, made longer.

  Li et al., RSA: Byzantine-Robust Stochastic Aggregation Methods, AAAI 2019,
  https://arxiv.org/abs/1811.03761.

  Args:
    share: of all clients, rounded to the nearest number of them.
    scale: factor on the update's length; the paper's is 4.
  """
  def send(message: PyTree, key: jax.Array) -> PyTree:
    del key
    return _floats(lambda x: -scale * x, message)
  return Attack(share, send=send)


@knobs.checked(share=_SHARE, scale=_SCALE)
def noise(*, share: float = 0.2, scale: float = 10.0) -> Attack:
  """Hostile clients send normal noise in place of their update.

  Li et al., RSA: Byzantine-Robust Stochastic Aggregation Methods, AAAI 2019,
  https://arxiv.org/abs/1811.03761.

  Args:
    share: of all clients, rounded to the nearest number of them.
    scale: length of the noise over that of the update, approximately.
  """
  def send(message: PyTree, key: jax.Array) -> PyTree:
    count = max(tree.num_scalars(message), 1)
    spread = scale * tree.global_norm(message) / count ** 0.5
    leaves, form = jax.tree.flatten(message)
    keys = jax.tree.unflatten(form, list(jax.random.split(key, len(leaves))))
    return _floats(
        lambda x, key: spread * jax.random.normal(key, x.shape), message, keys)
  return Attack(share, send=send)


ATTACKS: registry.Registry[Callable[..., Attack | None]] = (
    registry.Registry('attack', {
        'label_flip': label_flip,
        'noise': noise,
        'none': none,
        'sign_flip': sign_flip,
    }))


def _floats(function: Callable[..., jax.Array], message: PyTree, *rest: PyTree
            ) -> PyTree:
  """Maps the leaves that are floats, and keeps their dtypes."""
  return jax.tree.map(
      lambda x, *more: function(x, *more).astype(x.dtype)
      if jnp.issubdtype(x.dtype, jnp.floating) else x, message, *rest)


def make(text: str) -> Attack | None:
  """Makes the attack that a text such as 'sign_flip(share=.3)' names.

  None stands for no attack.

  Raises:
    FieldError: for an unknown name or knob, or a user's builder that fails or
      gives no attack.
  """
  made: Attack | None = registry.build('attack', text, ATTACKS)
  if registry.is_own(text, ATTACKS):
    made = _watched(text, made)
  return made if made is not None and made.share > 0 else None


def _watched(text: str, made: Attack | None) -> Attack:
  """Makes a user's attack name itself in its errors."""
  blame.check('attack', text, made, isinstance(made, Attack), 'Attack')
  assert made is not None
  share: Any = made.share
  if hasattr(share, 'dtype'):  # NumPy's, or JAX's.
    share = share.tolist()
  if fault := knobs.fault(share, _SHARE):
    raise checks.FieldError(
        'attack', text.strip(), f'gives share={share!r}, which must be '
        f'{fault}.')
  made = made._replace(share=share)
  if made.send is None:
    return made
  theirs = made.send

  def send(message: PyTree, key: jax.Array) -> PyTree:
    sent = theirs(message, key)
    if fault := tree.unlike(sent, message):
      raise ValueError(f'its send {fault}.')
    return sent
  return made._replace(send=blame.named('attack', text, send, own=True))


def hostile(attack: Attack, key: jax.Array, num_clients: int) -> jax.Array:
  """Draws the clients that attack in a run.

  Args:
    attack: has their share.
    key: of the initial values of a seed, see `training.runner.root_keys`.
    num_clients: N.

  Returns:
    bool[N], true for a hostile client.
  """
  count = round(attack.share * num_clients)
  order = jax.random.permutation(jax.random.fold_in(key, 0xbad), num_clients)
  return order < count


def attacked(attack: Attack, update: Callable[..., Update], num_classes: int
             ) -> Callable[..., Update]:
  """Makes a client's update that attacks if the client is hostile.

  Args:
    attack: what hostile clients do.
    update: (payload, client, key) -> Update, what honest clients do.
    num_classes: C.

  Returns:
    (payload, client, hostile bool[], key) -> Update.
  """
  def run(payload: PyTree, client: Client, is_hostile: jax.Array,
          key: jax.Array) -> Update:
    if attack.flips_labels:
      labels = jnp.asarray(client.train.labels)
      client = client._replace(train=client.train._replace(labels=jnp.where(
          is_hostile, num_classes - 1 - labels, labels)))
    made = update(payload, client, key)
    if attack.send is None:
      return made
    sent = attack.send(made.message, jax.random.fold_in(key, 0xbad))
    return made._replace(message=tree.where(is_hostile, sent, made.message))
  return run
