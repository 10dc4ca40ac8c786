r"""(IID, IID): labels and unlabeled images dealt at random.

The easiest setting of FedDure; see `cifar_dirdir.py`.

python experiments/cifar_iid.py \
    --flagfile=experiments/flagfiles/feddure/cifar_iid.fixmatch.flags \
    --data_dir=DIR

Defined in fedjax_ssl/cli/settings.py.
"""
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('cifar_iid')
