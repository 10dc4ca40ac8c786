r"""Fully labeled beside fully unlabeled clients, or all partially labeled.

The setting of FedIRM (https://arxiv.org/abs/2106.08600) and RSCFed
(https://arxiv.org/abs/2203.13993): a capped Dirichlet partition, of which the
first --num_labeled_clients clients know all their labels and the others none.
With --num_labeled_clients=-1 every client knows --labeled_fraction of its own.

python experiments/labeled_clients.py --data_dir=DIR \
    --flagfile=experiments/flagfiles/rscfed/labeled_clients.rscfed_fmnist.flags

Defined in fedjax_ssl/cli/settings.py.
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('labeled_clients')
