"""FedDure: two regulators decide how much a client trusts its pseudo-labels."""
from fedjax_ssl.methods.feddure.bilevel import Carry, Rules, start, step, Views
from fedjax_ssl.methods.feddure.method import feddure, Server

__all__ = ['Carry', 'feddure', 'Rules', 'Server', 'start', 'step', 'Views']
