"""Kinds of flags that say how, where or by whom something is run, not what.

Reports read what runs of any version have stored and know no configuration, so
the names stand below both. `config_test` holds them against its fields.
"""
from __future__ import annotations

# Which of several processes this is.
PROCESSES = ('distributed', 'coordinator_address', 'num_processes',
             'process_id')
# Where a run is, and what holds for one start of it: a command that repeats the
# run has none of them.
ONE_START = ('workdir', 'eval_only', *PROCESSES)
# How a machine's memory and speed are used. Some of them may be measured, so
# that runs of one sweep on several machines differ in them.
MACHINE = ('chunk_size', 'client_map', 'client_memory', 'conv_impl')
# What runs of other seeds may differ in and still be one row of a table.
OF_A_SEED = (
    *ONE_START, 'data_dir', 'seed', 'seeds', 'seed_map', 'bounds',
    'tensorboard', 'track', 'report', 'pictures', 'num_devices',
    'checkpoint_every')
# What is tuned for a method, besides its knobs.
TUNED = ('learning_rate', 'lr_schedule', 'momentum', 'optimizer',
         'weight_decay', 'server_learning_rate', 'server_optimizer')
# What a run may have otherwise than a paper's cell and still be that cell.
NOT_THE_CELL = (*OF_A_SEED, *MACHINE, 'embeddings', 'eval_every',
                'schedule_rounds', 'aggregation_order')
