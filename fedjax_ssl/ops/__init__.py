"""Kernels without weights of their own: convolutions, products, pooling."""
