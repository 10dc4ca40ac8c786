r"""Fully labeled beside fully unlabeled clients, or all partially labeled.

python experiments/labeled_clients.py --data_dir=DIR \
    --flagfile=experiments/flagfiles/rscfed/labeled_clients.rscfed_fmnist.flags
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('labeled_clients')
