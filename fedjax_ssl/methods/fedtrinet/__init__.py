"""FedTriNet: three networks vote; their labels stay."""
from fedjax_ssl.methods.fedtrinet.method import fedtrinet, threshold_at, vote

__all__ = ['fedtrinet', 'threshold_at', 'vote']
