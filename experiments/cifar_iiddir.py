r"""(IID, DIR): labels dealt at random, unlabeled images Dirichlet.

python experiments/cifar_iiddir.py \
    --flagfile=experiments/flagfiles/feddure/cifar_iiddir.fixmatch.flags \
    --data_dir=DIR

How rows are dealt, and its defaults: fedjax_ssl/running/settings.py.
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('cifar_iiddir')
