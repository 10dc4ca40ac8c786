r"""Batch non-IID: labels are even, one class dominates a client's other images.

python experiments/cifar_batch_noniid.py --data_dir=DIR \
    --flagfile=experiments/flagfiles/fedmatch_iclr/cifar_batch_noniid.fedmatch_v3.flags

How rows are dealt, and its defaults: fedjax_ssl/running/settings.py.
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('cifar_batch_noniid')
