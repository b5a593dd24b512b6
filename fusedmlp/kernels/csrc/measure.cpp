#include "measure.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

namespace fusedmlp {
namespace {

constexpr float kRoundMs = 2.0f;
constexpr int kRounds = 3;
constexpr float kNoise = 0.01f;

void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("CUDA error: ") + cudaGetErrorString(error));
}

class Event {
 public:
  Event() { check(cudaEventCreate(&event_)); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

class Timer {
 public:
  explicit Timer(cudaStream_t stream) : stream_(stream) {}

  // Milliseconds of one run, the mean over `times` runs.
  float operator()(const std::function<bool(size_t)>& run, size_t candidate, int times) {
    check(cudaEventRecord(begin_, stream_));
    for (int i = 0; i < times; ++i) run(candidate);
    check(cudaEventRecord(end_, stream_));
    check(cudaEventSynchronize(end_));
    float ms = 0.0f;
    check(cudaEventElapsedTime(&ms, begin_, end_));
    return ms / static_cast<float>(times);
  }

 private:
  cudaStream_t stream_;
  Event begin_, end_;
};

}  // namespace

std::optional<size_t> fastest(cudaStream_t stream, size_t count, const std::function<bool(size_t)>& run) {
  std::vector<size_t> able;
  // The first run of a candidate loads its kernels, and may measure something itself.
  for (size_t i = 0; i < count; ++i) {
    if (run(i)) able.push_back(i);
  }
  if (able.empty()) return std::nullopt;
  if (able.size() == 1) return able.front();
  Timer time(stream);
  std::vector<float> best(count, std::numeric_limits<float>::infinity());
  for (int round = 0; round < kRounds; ++round) {
    for (const size_t i : able) {
      const float guess = round == 0 ? time(run, i, 1) : best[i];
      const int times = std::clamp(static_cast<int>(kRoundMs / std::max(guess, 1e-3f)), 1, 50);
      best[i] = std::min(best[i], time(run, i, times));
    }
  }
  size_t choice = able.front();
  for (const size_t i : able) {
    if (best[i] < best[choice] * (1.0f - kNoise)) choice = i;
  }
  return choice;
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace fusedmlp
