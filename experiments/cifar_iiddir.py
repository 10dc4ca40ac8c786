r"""(IID, DIR): labels dealt at random, unlabeled images Dirichlet.

The middle setting of FedDure; see `cifar_dirdir.py`.

python experiments/cifar_iiddir.py \
    --flagfile=experiments/flagfiles/feddure/cifar_iiddir.fixmatch.flags \
    --data_dir=DIR

Defined in fedjax_ssl/cli/settings.py.
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('cifar_iiddir')
