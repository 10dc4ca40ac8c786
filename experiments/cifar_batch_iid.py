r"""Batch IID: every client has as many images of each class.

Table 2 of FedMatch (first version, https://arxiv.org/abs/2006.12097): 100
clients, 5 labels a class and client, 5 or 10 clients a round.

python experiments/cifar_batch_iid.py --data_dir=DIR \
    --flagfile=experiments/flagfiles/fedmatch/cifar_batch_iid.fedmatch_dense.flags

Defined in fedjax_ssl/cli/settings.py.
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('cifar_batch_iid')
