r"""(IID, IID): labels and unlabeled images dealt at random.

python experiments/cifar_iid.py \
    --flagfile=experiments/flagfiles/feddure/cifar_iid.fixmatch.flags \
    --data_dir=DIR

How rows are dealt, and its defaults: fedjax_ssl/running/settings.py.
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('cifar_iid')
