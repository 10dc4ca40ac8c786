"""FedDure: two regulators decide how much a client trusts its pseudo-labels."""
from fedjax_ssl.methods.feddure.bilevel import Carry, Rules, start, step
from fedjax_ssl.methods.feddure.method import feddure, Server
from fedjax_ssl.methods.feddure.regulation import init_fine
from fedjax_ssl.methods.parts.network import Views

__all__ = ['Carry', 'feddure', 'init_fine', 'Rules', 'Server', 'start', 'step',
           'Views']
