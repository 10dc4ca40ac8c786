r"""Agents with labels only and agents without any, dealt at random.

The setting of FedSSL's Tables 1 to 3 (Fan et al., IJCAI 2022): of N agents the
first --num_labeled_clients share the labels, the others all rows without.

python experiments/agents_iid.py --data_dir=DIR \
    --flagfile=experiments/flagfiles/fedssl/agents_iid.fedssl_mnist_2s6q_10.flags

Defined in fedjax_ssl/cli/settings.py.
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('agents_iid')
