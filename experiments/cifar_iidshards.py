r"""(IID, shards): labels at random, images of two classes a client.

python experiments/cifar_iidshards.py --data_dir=DIR --labels_at=server \
    --method=semifl

How rows are dealt, and its defaults: fedjax_ssl/running/settings.py.
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('cifar_iidshards')
