r"""Cross-device: 100 clients, 10 a round, all rows dealt by one Dirichlet.

The first setting of FedLabel (ICCV 2023, https://arxiv.org/abs/2307.08809):
data cut 80/5/15 into train, validation and test, 20 % or 50 % of each client's
rows labeled at random.

python experiments/cross_device.py \
    --flagfile=experiments/flagfiles/fedlabel/cross_device.fedlabel_cifar10.flags \
    --data_dir=DIR

Defined in fedjax_ssl/cli/settings.py.
"""  # noqa: E501
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('cross_device')
