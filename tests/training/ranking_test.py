"""Macro precision, recall and AUC against scikit-learn."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn import metrics as oracle

from fedjax_ssl.training import classification_metrics, evaluate

# Rows, classes, and how many values a logit can take: few make many ties.
CASES = [(60, 3, 1000), (60, 3, 3), (257, 7, 4), (40, 2, 2)]


def draw(rows, classes, values):
  rng = np.random.default_rng(rows + values)
  labels = rng.permutation(np.arange(rows) % classes)
  logits = rng.integers(0, values, (rows, classes)) * (4 / values)
  logits[np.arange(rows), labels] += 0.5
  return jnp.asarray(logits, jnp.float32), jnp.asarray(labels)


@pytest.mark.parametrize('case', CASES, ids=str)
def test_scores_are_those_of_scikit_learn(case):
  logits, labels = draw(*case)
  got = jax.jit(evaluate.scores)(logits, labels)
  p = np.asarray(jax.nn.softmax(logits), np.float64)
  guess = np.asarray(logits.argmax(-1))
  known = {'average': 'macro', 'zero_division': 0}
  areas = [oracle.roc_auc_score(labels == c, p[:, c])
           for c in range(case[1])]
  np.testing.assert_allclose(got['accuracy'], oracle.accuracy_score(
      labels, guess), rtol=1e-6)
  np.testing.assert_allclose(got['macro_precision'], oracle.precision_score(
      labels, guess, **known), rtol=1e-6)
  np.testing.assert_allclose(got['macro_recall'], oracle.recall_score(
      labels, guess, **known), rtol=1e-6)
  np.testing.assert_allclose(got['auc'], np.mean(areas), rtol=1e-5)


def test_classes_that_do_not_occur_do_not_count():
  labels, guess = jnp.array([0, 0, 1, 1]), jnp.array([0, 3, 1, 0])
  got = classification_metrics.precision_recall(guess, labels, 6)
  want = (oracle.precision_score(labels, guess, average='macro',
                                 zero_division=0),
          oracle.recall_score(labels, guess, average='macro', zero_division=0))
  np.testing.assert_allclose(got, want, rtol=1e-6)
  scores = jax.nn.one_hot(labels, 6)
  assert classification_metrics.one_vs_rest_auc(scores, labels) == 1
  assert classification_metrics.one_vs_rest_auc(-scores, labels) == 0
  assert classification_metrics.one_vs_rest_auc(jnp.zeros((4, 6)),
                                                labels) == 0.5
  assert np.isnan(
      classification_metrics.one_vs_rest_auc(scores, jnp.zeros(4, jnp.int32)))


def test_the_area_is_exact_beyond_the_integers_of_float32():
  rows = 20_000
  labels = jnp.arange(rows) % 2
  scores = jnp.stack([-labels, labels], 1) * 3.0 + jax.random.normal(
      jax.random.key(0), (rows, 2))
  want = oracle.roc_auc_score(labels, scores[:, 1])
  got = classification_metrics.one_vs_rest_auc(
      scores[:, 1:] * jnp.array([[-1.0, 1.0]]), labels)
  np.testing.assert_allclose(got, want, rtol=1e-5)
