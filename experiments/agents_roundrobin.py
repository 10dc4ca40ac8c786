r"""Agents with labels only and agents without any, whole classes in turn.

python experiments/agents_roundrobin.py --data_dir=DIR \
    --flagfile=experiments/flagfiles/fedssl/agents_roundrobin.fedssl_mnist_1s3q_10.flags

How rows are dealt, and its defaults: fedjax_ssl/running/settings.py.
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('agents_roundrobin')
