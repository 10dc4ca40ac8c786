r"""Agents with labels only and agents without any, dealt at random.

The setting of FedSSL's Tables 1 to 3 (Fan et al., IJCAI 2022): of N agents the
first --num_labeled_clients share the labels, the others all rows without.

python experiments/agents_iid.py --data_dir=DIR \
    --flagfile=experiments/flagfiles/fedssl/agents_iid.fedssl_mnist_2s6q_10.flags
"""
import common
from fedjax_ssl import data

if __name__ == '__main__':
  common.main(
      common.agents(data.iid_random),
      dataset='mnist', model='cnn', method='fedssl', optimizer='adam',
      learning_rate=1e-3, num_clients=8, num_labeled_clients=2, cohort_size=8,
      labels_per_class=10, labeled_batch=64, unlabeled_batch=64,
      local_steps=50, num_rounds=100, validation_fraction=0.02)
