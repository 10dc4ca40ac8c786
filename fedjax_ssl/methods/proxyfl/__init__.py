"""ProxyFL: the last layer's weights as class proxies, at clients and server."""
from fedjax_ssl.methods.proxyfl.method import (
    LABELERS,
    labels,
    projected,
    proxyfl,
    Server,
)
from fedjax_ssl.methods.proxyfl.proxies import contrast, margin, tuned

__all__ = ['contrast', 'labels', 'LABELERS', 'margin', 'projected', 'proxyfl',
           'Server', 'tuned']
