r"""Agents with labels only and agents without any, whole classes in turn.

The non-IID setting of FedSSL's Tables 4 and 5 (Fan et al., IJCAI 2022): class c
is at labeled agent c mod N_S, and without labels at agent c mod N_Q.

python experiments/agents_roundrobin.py --data_dir=DIR \
    --flagfile=experiments/flagfiles/fedssl/agents_roundrobin.fedssl_mnist_1s3q_10.flags

Defined in fedjax_ssl/cli/settings.py.
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('agents_roundrobin')
