r"""Agents with labels only and agents without any, dealt at random.

python experiments/agents_iid.py --data_dir=DIR \
    --flagfile=experiments/flagfiles/fedssl/agents_iid.fedssl_mnist_2s6q_10.flags

How rows are dealt, and its defaults: fedjax_ssl/running/settings.py.
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('agents_iid')
