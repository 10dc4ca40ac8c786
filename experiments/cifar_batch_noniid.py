r"""Batch non-IID: labels are even, one class dominates a client's other images.

Table 1 of FedMatch (ICLR 2021, https://arxiv.org/abs/2006.12097): 100 clients,
5 labels a class and client, 5 clients a round; unlabeled rows by `bimb`.

python experiments/cifar_batch_noniid.py --data_dir=DIR \
    --flagfile=experiments/flagfiles/fedmatch_iclr/cifar_batch_noniid.fedmatch_v3.flags

Defined in fedjax_ssl/cli/settings.py.
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('cifar_batch_noniid')
