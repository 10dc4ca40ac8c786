"""From files to federations: data sets, partitions, streams.

Importing this package loads neither scikit-learn, TensorFlow Datasets nor
Pillow; what needs them loads them when called.
"""
from fedjax_ssl.data import (
    augment,
    datasets,
    federation,
    partition,
    streaming,
)
from fedjax_ssl.data.datasets import (
    DataError,
    Dataset,
    load,
    split_validation,
    text,
)
from fedjax_ssl.data.datasets import (
    register as register_dataset,
)
from fedjax_ssl.data.federation import class_counts, describe, federate
from fedjax_ssl.data.partition import (
    bimb,
    choose_labeled,
    choose_validation,
    dirichlet_capped,
    dirichlet_clients,
    dirichlet_pairs,
    dirichlet_shares,
    iid_count,
    iid_random,
    label_clients,
    label_mixed,
    label_within,
    labeled_min_size,
    load_partition,
    make_partition,
    Partition,
    partition_hash,
    PARTITIONS,
    round_robin,
    save_partition,
    shards,
    shift,
)
from fedjax_ssl.data.streaming import deal_tasks

__all__ = (
    'DataError', 'Dataset', 'PARTITIONS', 'Partition', 'augment', 'bimb',
    'choose_labeled', 'choose_validation', 'class_counts', 'datasets',
    'deal_tasks', 'describe', 'dirichlet_capped', 'dirichlet_clients',
    'dirichlet_pairs', 'dirichlet_shares', 'federate', 'federation',
    'iid_count', 'iid_random', 'label_clients', 'label_mixed',
    'label_within', 'labeled_min_size', 'load', 'load_partition',
    'make_partition', 'partition', 'partition_hash', 'register_dataset',
    'round_robin', 'save_partition',
    'shards', 'shift', 'split_validation', 'streaming', 'text')
