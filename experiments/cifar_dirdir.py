r"""(DIR, DIR): labels and unlabeled images both Dirichlet over the clients.

The hardest setting of FedDure (AAAI 2024, https://arxiv.org/abs/2307.05358):
100 clients, 5 a round, 5 labels a class and client on average.

python experiments/cifar_dirdir.py \
    --flagfile=experiments/flagfiles/feddure/cifar_dirdir.fixmatch.flags \
    --data_dir=DIR

Defined in fedjax_ssl/cli/settings.py.
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('cifar_dirdir')
