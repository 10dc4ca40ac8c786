r"""(pairs, pairs): labels and images Dirichlet in pairs of clients.

python experiments/cifar_pairs.py --data_dir=DIR --method=sage

How rows are dealt, and its defaults: fedjax_ssl/running/settings.py.
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('cifar_pairs')
