"""Laws of the generator's and the discriminator's losses."""
from __future__ import annotations

from absl.testing import absltest, parameterized
import jax
import numpy as np

from fedjax_ssl import losses
from fedjax_ssl.losses import adversarial

B, C = 6, 4
MASK = np.array([1, 1, 0, 1, 0, 1], np.float32)
FAKE = np.random.default_rng(1).normal(size=B).astype(np.float32)
SOFT = np.random.default_rng(2).dirichlet(np.ones(C), B).astype(np.float32)


class AdversarialTest(parameterized.TestCase):

  def test_losses_by_hand(self):

    def sigmoid(x):
      return 1 / (1 + np.exp(-x))

    real, fake, one = np.array([1.5]), np.array([-0.5]), np.ones(1)
    np.testing.assert_allclose(
        adversarial.discriminator_loss(real, fake, one, fake_weight=0.7)[0],
        -np.log(sigmoid(1.5)) - 0.7 * np.log(1 - sigmoid(-0.5)), rtol=1e-5)
    np.testing.assert_allclose(
        adversarial.discriminator_loss(real, fake, one, kind='hinge')[0], 0.5)
    for kind, want in (('non_saturating', -np.log(sigmoid(-0.5))),
                       ('saturating', np.log(1 - sigmoid(-0.5))),
                       ('hinge', 0.5)):
      np.testing.assert_allclose(
          adversarial.generator_loss(fake, one, kind=kind)[0], want, rtol=1e-5)

  @parameterized.parameters('non_saturating', 'saturating', 'hinge')
  def test_the_two_pull_against_each_other(self, kind):
    up = jax.grad(lambda x: adversarial.generator_loss(x, MASK, kind=kind)[0])(
        FAKE)
    down = jax.grad(lambda x: adversarial.discriminator_loss(x, x, MASK)[0] -
                    adversarial.discriminator_loss(x, FAKE, MASK)[0])(FAKE)
    real = MASK > 0
    self.assertTrue((np.asarray(up)[real] < 0).all())
    self.assertTrue((np.asarray(down)[real] > 0).all())

  def test_realism_weight(self):
    got = losses.realism_weight(np.array([0.0, 0.5, 1.0]))
    np.testing.assert_allclose(got, [1, np.exp(-0.5), 1], rtol=1e-6)

  def test_reconstruction(self):
    images, mask = np.ones((2, 3, 3, 1)), np.array([1.0, 0.0])
    total = adversarial.reconstruction(3 * images, images, mask)[0]
    mean = adversarial.reconstruction(
        3 * images, images, mask, over_pixels='mean')[0]
    self.assertEqual((float(total), float(mean)), (36, 4))

  def test_conditions_agree_where_nothing_is_mixed_in(self):
    source, target = SOFT, np.eye(C)[[0, 1, 2, 3, 0, 1]]
    mixed = adversarial.fake_condition(0.25, source, target)
    np.testing.assert_allclose(
        mixed, 0.25 * source + 0.75 * target, rtol=1e-6)
    for label in ('mixed', 'target'):
      np.testing.assert_allclose(adversarial.fake_condition(
          0.0, source, target, label=label), target)
    np.testing.assert_allclose(
        adversarial.fake_condition(1.0, source, target, label='target'),
        target)


if __name__ == '__main__':
  absltest.main()
