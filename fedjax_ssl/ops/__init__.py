"""Kernels without weights of their own: convolutions, products, pooling.

`conv` is the one that models call, and chooses a form by shape and backend:
`conv_im2col` where channels are few (first layers) and for 1x1 kernels,
`conv_winograd` for 3x3 kernels, `conv_rowwise` for 5x5 kernels and large maps,
`conv_direct` for the rest, such as strides.
"""
