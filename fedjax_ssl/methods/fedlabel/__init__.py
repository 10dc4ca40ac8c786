"""FedLabel: the surer of the global and the local model labels each row."""
from fedjax_ssl.methods.fedlabel.method import fedlabel
from fedjax_ssl.methods.fedlabel.selection import (
    Choice,
    confidence_score,
    CONFIDENCES,
    DIVERGENCES,
    LABELERS,
    loss,
    select,
)

__all__ = ['Choice', 'confidence_score', 'CONFIDENCES', 'DIVERGENCES',
           'fedlabel', 'LABELERS', 'loss', 'select']
