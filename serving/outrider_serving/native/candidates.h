// The most probable tokens of a row: found by a falling threshold, sorted as far as a cut looks at them.

#pragma once

#include <algorithm>
#include <bit>
#include <utility>

#include "memory.h"
#include "vectors.h"

namespace outrider {

constexpr int64_t kBlock = 64;  // tokens whose highest weight is known
constexpr int64_t kMostBins = 1 << 13;

// Which of the most probable tokens are kept; see `Cut` in sampling/distribution.py.
struct Cut {
  int64_t top_k;  // 0 for all
  double top_p, min_p;
};

struct Candidate {
  double prob;
  int64_t id;

  bool operator<(const Candidate& other) const { return prob != other.prob ? prob > other.prob : id < other.id; }
};

// Where candidates are kept.
class Room {
 public:
  void reserve(int64_t vocabulary) {
    found = found_memory_.reserve(vocabulary + 1);
    ordered = ordered_memory_.reserve(vocabulary);
    ends = ends_memory_.reserve(kMostBins);
  }

  Candidate *found, *ordered;
  int64_t* ends;  // [bins], in `ordered`

 private:
  Memory<Candidate> found_memory_, ordered_memory_;
  Memory<int64_t> ends_memory_;
};

// The most probable tokens of a row, in order: by descending probability, equally probable ones by ascending id.
class Candidates {
 public:
  // weights: [blocks * kBlock] relative to the highest, which sum up to `total`; peaks: the highest of each block.
  Candidates(Room& room, const double* weights, const double* peaks, int64_t blocks, double total)
      : room_(room), weights_(weights), peaks_(peaks), blocks_(blocks), total_(total) {}

  int64_t count() const { return count_; }
  double mass() const { return mass_; }
  double top() const { return 1 / total_; }  // the highest probability

  // Adds the tokens of at least this weight, which is lower than before.
  void widen(double lowest) {
    const int64_t before = count_;
    for (int64_t block = 0; block < blocks_; ++block) {
      if (peaks_[block] < lowest) continue;
      for (int64_t id = block * kBlock; id < (block + 1) * kBlock; ++id) {
        const double weight = weights_[id];
        room_.found[count_] = {weight, id};
        count_ += (weight >= lowest) & (weight < lowest_);
      }
    }
    lowest_ = lowest;
    for (int64_t i = before; i < count_; ++i) {
      double& prob = room_.found[i].prob;
      prob /= total_;
      mass_ += prob;
      least_ = std::min(least_, prob);
    }
  }

  // Puts them into bins by their probability, about as many bins as candidates. Comes after all are added.
  void spread() {
    const uint64_t range = bits(top()) - bits(least_);
    const uint64_t most = std::clamp(count_, int64_t(1), kMostBins);
    shift_ = 0;
    while (range >> shift_ >= most) ++shift_;
    bins_ = int64_t(range >> shift_) + 1;
    int64_t* const ends = room_.ends;
    std::fill(ends, ends + bins_, 0);
    for (int64_t i = 0; i < count_; ++i) ++ends[bin(room_.found[i])];
    for (int64_t n = 0, at = 0; n < bins_; ++n) at += std::exchange(ends[n], at);
    for (int64_t i = 0; i < count_; ++i) room_.ordered[ends[bin(room_.found[i])]++] = room_.found[i];
  }

  // In the order; a bin is sorted when it is reached.
  const Candidate& operator[](int64_t index) {
    while (sorted_ <= index) {
      Candidate *first = room_.ordered + sorted_, *end = room_.ordered + room_.ends[next_++];
      if (!std::is_sorted(first, end)) std::sort(first, end);  // equally probable ones are
      sorted_ = end - room_.ordered;
    }
    return room_.ordered[index];
  }

 private:
  static uint64_t bits(double x) { return std::bit_cast<uint64_t>(x); }
  int64_t bin(const Candidate& one) const { return int64_t((bits(top()) - bits(one.prob)) >> shift_); }

  Room& room_;
  const double *const weights_, *const peaks_;
  const int64_t blocks_;
  const double total_;
  int64_t count_ = 0, bins_ = 0, next_ = 0, sorted_ = 0;
  int shift_ = 0;
  double mass_ = 0, least_ = 1, lowest_ = std::numeric_limits<double>::infinity();
};

// Whether none is missing that a cut keeps or counts, when all of at least the weight `lowest` are there. A missing
// one is no tie: so far below the highest, weights that differ at all differ by more than the last bits.
inline bool enough(const Candidates& candidates, const Cut& cut, double lowest) {
  constexpr double slack = 1e-9;  // far more than sums in two orders differ by
  if (lowest < cut.min_p * (1 - slack) && (cut.top_k == 0 || cut.top_p == 1)) return true;
  return cut.top_k ? candidates.count() >= cut.top_k : candidates.mass() > cut.top_p * (1 + slack);
}

// How many of them a cut keeps, and their mass, as `distribution._kept` in Python says.
inline int64_t kept_of(Candidates& candidates, const Cut& cut, double& mass) {
  const int64_t most = cut.top_k ? std::min(cut.top_k, candidates.count()) : candidates.count();
  double whole = 1;
  if (cut.top_k && cut.top_p < 1) {
    whole = 0;
    for (int64_t i = 0; i < most; ++i) whole += candidates[i].prob;
  }
  const double least = cut.min_p * candidates.top();
  mass = 0;
  for (int64_t i = 0; i < most; ++i) {
    const double prob = candidates[i].prob;
    if (prob == 0 || prob < least) return i;
    mass += prob;
    if (cut.top_p < 1 && mass >= cut.top_p * whole) return i + 1;
  }
  return most;
}

}  // namespace outrider
