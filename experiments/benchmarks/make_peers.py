r"""Makes the environments of the systems that we are measured against.

One virtual environment for each, with versions that are known to work. pip's
own settings say where packages come from; on Linux give it PyTorch's CPU
builds, or it takes several GB of CUDA libraries for each of three environments.

python experiments/benchmarks/make_peers.py --peers_dir=runs/peers
python experiments/benchmarks/make_peers.py --peers=fedjax
"""
from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.benchmarks import harness, peer_envs

FLAGS = flags.FLAGS

flags.DEFINE_string('peers_dir', 'runs/peers', 'Folder of the environments.')
flags.DEFINE_multi_enum('peers', sorted(peer_envs.ENVIRONMENTS), sorted(
    peer_envs.ENVIRONMENTS), 'Which ones; may be given several times.')


def make(folder: pathlib.Path, name: str) -> None:
  """Makes one environment, anew if an unfinished or other one is there.

  Raises:
    ValueError: if it cannot be made, with pip's last line, or if something
      else is in its place.
  """
  home = folder / name
  if home.exists() or home.is_symlink():
    if not peer_envs.is_ours(folder, name):
      raise ValueError(f'{home} is there and was not made by this script; '
                       'remove it, or give another --peers_dir.')
    shutil.rmtree(home)
  try:
    peer_envs.begin(folder, name)
  except OSError as error:
    raise ValueError(f'--peers_dir={folder} cannot be written: '
                     f'{error.strerror}.') from error
  made = peer_envs.ENVIRONMENTS[name]
  python = str(peer_envs.interpreter(folder, name))
  pip = [python, '-m', 'pip', '--disable-pip-version-check', 'install', '-q']
  commands = [[sys.executable, '-m', 'venv', str(home)],
              [*pip, *made.requirements]]
  if made.alone:
    commands.append([*pip, '--no-deps', *made.alone])
  for command in commands:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
      lines = (done.stderr or done.stdout).strip().splitlines()
      raise ValueError(f'The environment of {name} in {home} cannot be made: '
                       f'{lines[-1] if lines else done.returncode}')
  peer_envs.mark(folder, name)


def main() -> None:
  """Makes what is missing."""
  folder = pathlib.Path(FLAGS.peers_dir).absolute()
  for name in dict.fromkeys(FLAGS.peers):
    if peer_envs.complaint(folder, name) is None:
      print(f'{name}: there already')
      continue
    print(f'{name}: installing ...', flush=True)
    make(folder, name)
    print(f'{name}: {folder / name}')


if __name__ == '__main__':
  harness.run(main)
