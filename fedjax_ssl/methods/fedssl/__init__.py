"""FedSSL: blends from a generator that all agents share, private or not."""
from fedjax_ssl.methods.fedssl.method import fedssl, Server, step

__all__ = ['fedssl', 'Server', 'step']
