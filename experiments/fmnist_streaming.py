r"""Streaming non-IID: clients meet their images in 10 tasks, the mix drifts.

python experiments/fmnist_streaming.py --data_dir=DIR \
    --flagfile=experiments/flagfiles/fedmatch/fmnist_streaming.fedmatch_dense.flags

How rows are dealt, and its defaults: fedjax_ssl/running/settings.py.
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('fmnist_streaming')
