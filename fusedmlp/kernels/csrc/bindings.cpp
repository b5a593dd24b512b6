// Gives the operators, whose schemas Python has defined, their CUDA kernels.
#include <torch/library.h>

#include "operators.h"

TORCH_LIBRARY_IMPL(fusedmlp_cuda, CUDA, library) {
  library.impl("gelu_fwd", TORCH_FN(fusedmlp::gelu_fwd_op));
  library.impl("gelu_bwd", TORCH_FN(fusedmlp::gelu_bwd_op));
  library.impl("softmax_fwd", TORCH_FN(fusedmlp::softmax_fwd_op));
  library.impl("softmax_bwd", TORCH_FN(fusedmlp::softmax_bwd_op));
  library.impl("linear_gelu_fwd", TORCH_FN(fusedmlp::linear_gelu_fwd_op));
  library.impl("linear_gelu_bwd", TORCH_FN(fusedmlp::linear_gelu_bwd_op));
  library.impl("mlp_fwd", TORCH_FN(fusedmlp::mlp_fwd_op));
  library.impl("mlp_bwd", TORCH_FN(fusedmlp::mlp_bwd_op));
}
