"""A federation, a task and a method made in Python, without files or flags.

python experiments/examples/without_flags.py

Rows that are held out, `held`, belong to no client; with `validation=None` they
are the validation set.
"""
import numpy as np

import fedjax_ssl
from fedjax_ssl import data

digits, rng = data.load('digits'), np.random.default_rng(0)
labels = np.asarray(digits.train.labels)
held = data.choose_validation(rng, labels, fraction=0.05)
owner = data.dirichlet_capped(rng, labels, 20, where=~held)
few, rest = data.label_within(rng, labels, owner, fraction=0.1)
federation = data.federate(
    digits.train, validation=None, test=digits.test,
    partition=data.make_partition(few, rest, held), num_clients=20)
task = fedjax_ssl.make_task(fedjax_ssl.TaskSpec(
    num_classes=10, input_shape=digits.train.inputs.shape[1:], flip=False,
    local_steps=5))
method = fedjax_ssl.make_method('fixmatch(threshold=0.8)', task)
result = fedjax_ssl.train(method, federation, num_rounds=20)
print(f"accuracy {result.metrics['accuracy'][-1]:.3f}; 20 rounds are only a "
      'look, the quickstart trains for 150')
