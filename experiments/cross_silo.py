r"""Cross-silo: 5 or 10 hospitals with medical images, few labels.

python experiments/cross_silo.py \
    --flagfile=experiments/flagfiles/fedlabel/cross_silo.fedlabel_organamnist.flags \
    --data_dir=DIR

How rows are dealt, and its defaults: fedjax_ssl/running/settings.py.
"""  # noqa: E501
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('cross_silo')
