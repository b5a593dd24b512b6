// csrc/measure.cpp without a clock: every way gets its turn to be the fastest one.
#include "measure.h"

#include <vector>

namespace fusedmlp {

std::optional<size_t> fastest(cudaStream_t, size_t count, const std::function<bool(size_t)>& run) {
  static size_t turn = 0;
  std::vector<size_t> able;
  for (size_t i = 0; i < count; ++i) {
    if (run(i)) able.push_back(i);
  }
  return able.empty() ? std::nullopt : std::optional<size_t>(able[turn++ % able.size()]);
}

bool is_capturing(cudaStream_t) { return false; }

}  // namespace fusedmlp
