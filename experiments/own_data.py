r"""Your own images or texts: modest defaults, with both bounds and a report.

python experiments/own_data.py --data_dir=DIR --dataset=NAME

How rows are dealt, and its defaults: fedjax_ssl/running/settings.py.
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('own_data')
