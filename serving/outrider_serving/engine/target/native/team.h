// The threads of one pass: they share work out by units, and wait for each other between phases.

#pragma once

#include <atomic>
#include <cstdint>
#include <sched.h>

namespace outrider {

class Team {
 public:
  explicit Team(int size) : size_(size) {}

  // Every thread calls this with the same `units`; returns when all of them are done.
  template <class Work>
  void each(int64_t units, Work work) {
    for (int64_t unit; (unit = next_.fetch_add(1, std::memory_order_relaxed)) < units;) work(unit);
    wait();
  }

 private:
  void wait() {
    const int phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
      if (spins > kSpins) sched_yield();
      else pause();
    }
  }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  static constexpr int kSpins = 2000;

  const int size_;
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};

}  // namespace outrider
