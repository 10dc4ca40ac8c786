r"""Cross-device: 100 clients, 10 a round, all rows dealt by one Dirichlet.

python experiments/cross_device.py \
    --flagfile=experiments/flagfiles/fedlabel/cross_device.fedlabel_cifar10.flags \
    --data_dir=DIR

How rows are dealt, and its defaults: fedjax_ssl/running/settings.py.
"""  # noqa: E501
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('cross_device')
