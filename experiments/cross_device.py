r"""Cross-device: 100 clients, 10 a round, all rows dealt by one Dirichlet.

The first setting of FedLabel (ICCV 2023, https://arxiv.org/abs/2307.08809):
data cut 80/5/15 into train, validation and test, 20 % or 50 % of each client's
rows labeled at random.

python experiments/cross_device.py \
    --flagfile=experiments/flagfiles/fedlabel/cross_device.fedlabel_cifar10.flags \
    --data_dir=DIR
"""  # noqa: E501
import common

if __name__ == '__main__':
  common.main(
      common.one_pool, dataset='cifar10', model='resnet34', norm='group',
      method='fedlabel', split='80/5/15', num_clients=100, cohort_size=10,
      alpha=0.1, dirichlet='shares', labeled_fraction=0.2, learning_rate=0.1,
      local_steps=20, labeled_batch=64, unlabeled_batch=64,
      strong='ra_fedlabel', num_rounds=200)
