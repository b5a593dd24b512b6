// Which of several ways to compute the same thing is the fastest here: time them once, remember the answer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>

#include <cuda_runtime_api.h>

namespace fusedmlp {

// Index of the fastest of `count` candidates on `stream`. run(i) enqueues candidate i and returns false if it cannot
// run. Waits for the stream. An earlier candidate keeps its place unless a later one is faster by more than noise.
// Nothing, if none can run.
std::optional<size_t> fastest(cudaStream_t stream, size_t count, const std::function<bool(size_t)>& run);

// Whether `stream` is being captured into a CUDA graph: then nothing may be timed.
bool is_capturing(cudaStream_t stream);

// Measuring stops after so many problems, each of which takes up to a tenth of a second: where sizes change from call
// to call, it would never end.
constexpr size_t kMostMeasured = 128;

// Answers by problem, shared by all threads. The first answer stays, so that the same inputs give the same bits.
template <typename Answer, size_t kKeySize>
class Answers {
 public:
  using Key = std::array<int64_t, kKeySize>;

  std::optional<Answer> find(const Key& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = answers_.find(key);
    return found == answers_.end() ? std::nullopt : std::optional<Answer>(found->second);
  }

  bool is_full() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return answers_.size() >= kMostMeasured;
  }

  Answer keep(const Key& key, const Answer& answer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return answers_.emplace(key, answer).first->second;
  }

 private:
  std::mutex mutex_;
  std::map<Key, Answer> answers_;
};

}  // namespace fusedmlp
