"""FedMatch: one part of the weights for labels, one for unlabeled rows."""
from fedjax_ssl.methods.fedmatch.method import fedmatch

__all__ = ['fedmatch']
