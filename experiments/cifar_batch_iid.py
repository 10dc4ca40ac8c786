r"""Batch IID: every client has equally many images of each class.

python experiments/cifar_batch_iid.py --data_dir=DIR \
    --flagfile=experiments/flagfiles/fedmatch/cifar_batch_iid.fedmatch_dense.flags

How rows are dealt, and its defaults: fedjax_ssl/running/settings.py.
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('cifar_batch_iid')
