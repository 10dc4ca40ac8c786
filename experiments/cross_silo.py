r"""Cross-silo: 5 or 10 hospitals with medical images, few labels.

The second setting of FedLabel; see `cross_device.py`. OrganAMNIST and
BloodMNIST are MedMNIST's own files `organamnist.npz` and `bloodmnist.npz`.

python experiments/cross_silo.py \
    --flagfile=experiments/flagfiles/fedlabel/cross_silo.fedlabel_organamnist.flags \
    --data_dir=DIR
"""  # noqa: E501
import common

if __name__ == '__main__':
  common.main(
      common.one_pool, dataset='organamnist', model='resnet18', norm='group',
      method='fedlabel', split='80/5/15', num_clients=10, cohort_size=3,
      alpha=0.1, dirichlet='shares', labeled_fraction=0.05, learning_rate=0.1,
      local_steps=20, labeled_batch=64, unlabeled_batch=64,
      strong='ra_fedlabel', num_rounds=200)
