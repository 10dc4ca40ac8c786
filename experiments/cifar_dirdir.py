r"""(DIR, DIR): labels and unlabeled images both Dirichlet over the clients.

python experiments/cifar_dirdir.py \
    --flagfile=experiments/flagfiles/feddure/cifar_dirdir.fixmatch.flags \
    --data_dir=DIR

How rows are dealt, and its defaults: fedjax_ssl/running/settings.py.
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('cifar_dirdir')
