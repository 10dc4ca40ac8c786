r"""Cross-silo: 5 or 10 hospitals with medical images, few labels.

The second setting of FedLabel; see `cross_device.py`. OrganAMNIST and
BloodMNIST are MedMNIST's own files `organamnist.npz` and `bloodmnist.npz`.

python experiments/cross_silo.py \
    --flagfile=experiments/flagfiles/fedlabel/cross_silo.fedlabel_organamnist.flags \
    --data_dir=DIR

Defined in fedjax_ssl/cli/settings.py.
"""  # noqa: E501
from fedjax_ssl import cli

if __name__ == '__main__':
  cli.run_setting('cross_silo')
