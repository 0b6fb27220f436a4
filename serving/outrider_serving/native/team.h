// The threads of one pass: they share work out by units, and wait for each other between phases.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace outrider {

class Team {
 public:
  explicit Team(int size) : size_(size) {}

  // Every thread calls this with the same `units`; returns when all of them are done. A thread takes several in
  // a row, ever fewer towards the end (Polychronopoulos and Kuck 1987), as neighbours are read faster.
  template <class Work>
  void each(int64_t units, Work work) {
    for (int64_t unit = next_.load(std::memory_order_relaxed); unit < units;) {
      const int64_t some = std::max(int64_t(1), (units - unit) / (2 * size_));
      if (!next_.compare_exchange_weak(unit, unit + some, std::memory_order_relaxed)) continue;
      for (int64_t end = unit + some; unit < end; ++unit) work(unit);
      unit = next_.load(std::memory_order_relaxed);
    }
    wait();
  }

 private:
  // Spins for a moment, as phases are short, and then sleeps: the thread that is waited for may need this core.
  void wait() {
    const int phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      // In one order with the look for sleepers in notify_all, which may else come first, see none, and leave one
      // that went to sleep on the old phase asleep for good.
      phase_.store(phase + 1, std::memory_order_seq_cst);
      phase_.notify_all();
      return;
    }
    for (int spins = 0; spins < kSpins; ++spins) {
      if (phase_.load(std::memory_order_acquire) != phase) return;
      pause();
    }
    phase_.wait(phase, std::memory_order_acquire);
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  static constexpr int kSpins = 4000;

  const int size_;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};

}  // namespace outrider
