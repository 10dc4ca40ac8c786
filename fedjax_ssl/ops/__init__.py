"""Operations on arrays, without weights of their own.

Models call `conv.conv2d`. On a CPU it takes one of these forms:

  5x5 kernels, 16 input channels or more   conv_rowwise
  3x3 kernels, 16 input channels or more   conv_winograd, or conv_rowwise where
                                           maps are larger than weights
  1x1 kernels                              conv_im2col
  4 input channels or fewer                conv_im2col
  all else, such as strides                conv_direct

On other devices the programs use `conv_measure` to time these forms, XLA's own
convolution and `conv_taps`, and take the fastest. `conv_geometry` says where
windows lie, `matmul` is the matrix product, `pooling` the rectifier and 2x2
pooling, and `custom_vjp` makes functions that name their own derivatives.
"""
