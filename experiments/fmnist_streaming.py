r"""Streaming non-IID: clients meet their images in 10 tasks, the mix drifts.

Table 1 of FedMatch (first version, https://arxiv.org/abs/2006.12097): 10
clients, all of them in every round, 5 labels a class and client, or with
--labels_at=server 50 a class there; 10 rounds a task.

python experiments/fmnist_streaming.py --data_dir=DIR \
    --flagfile=experiments/flagfiles/fedmatch/fmnist_streaming.fedmatch_dense.flags

Defined in fedjax_ssl/cli/settings.py.
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('fmnist_streaming')
