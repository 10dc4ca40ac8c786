r"""Agents with labels only and agents without any, whole classes in turn.

The non-IID setting of FedSSL's Tables 4 and 5 (Fan et al., IJCAI 2022): class c
is at labeled agent c mod N_S, and without labels at agent c mod N_Q.

python experiments/agents_roundrobin.py --data_dir=DIR \
    --flagfile=experiments/flagfiles/fedssl/agents_roundrobin.fedssl_mnist_1s3q_10.flags
"""
import common
from fedjax_ssl import data

if __name__ == '__main__':
  common.main(
      common.agents(data.round_robin),
      dataset='mnist', model='cnn', method='fedssl', optimizer='adam',
      learning_rate=1e-3, num_clients=8, num_labeled_clients=2, cohort_size=8,
      labels_per_class=10, labeled_batch=64, unlabeled_batch=64,
      local_steps=50, num_rounds=100, validation_fraction=0.02)
