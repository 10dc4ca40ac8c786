r"""Fully labeled, unlabeled and partially labeled clients, in any mix.

python experiments/labeled_clients.py --data_dir=DIR \
    --flagfile=experiments/flagfiles/rscfed/labeled_clients.rscfed_fmnist.flags

How rows are dealt, and its defaults: fedjax_ssl/running/settings.py.
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('labeled_clients')
