"""Kinds of flags: which say what is run, and which only how, where or by whom.

A report may not read the configuration's module, which imports every method, so
the names stand here. `config_test` holds them against its fields.
"""
from __future__ import annotations

# Which of several processes this is.
PROCESSES = ('distributed', 'coordinator_address', 'num_processes',
             'process_id')
# Where a run is, or of one start of it: no command that repeats it has them.
ONE_START = ('workdir', 'eval_only', *PROCESSES)
# How a machine's memory and speed are used. Some of them may be measured, so
# that runs of one sweep on several machines differ in them.
MACHINE = ('chunk_size', 'client_map', 'client_memory', 'conv_impl')
# In which the seeds of one cell may differ.
OF_A_SEED = (*ONE_START, 'data_dir', 'seed', 'seeds', 'seed_map', 'bounds',
             'tensorboard', 'track', 'report', 'pictures', 'num_devices',
             'checkpoint_every')
# That say where, how often or on which machine, and not what is run.
FREE = (*OF_A_SEED, *MACHINE, 'embeddings', 'eval_every',
        'schedule_rounds', 'aggregation_order')
