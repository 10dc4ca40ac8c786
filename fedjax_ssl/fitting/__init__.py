"""Training from Python in one call: what the programs do, without flags."""
from fedjax_ssl.fitting.run import Run
from fedjax_ssl.fitting.start import fit

__all__ = ('Run', 'fit')
