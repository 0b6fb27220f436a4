// The law of the next token, softmax and cut; what `sampling.compiled` in Python drives.
//
// All is computed in float64, and each row by one thread: that takes less time than a thread may have to wait for
// another one where other programs have the cores, and a row's numbers depend on nothing but the row.

#include <omp.h>

#include <cstdlib>
#include <new>
#include <utility>
#include <vector>

#include "candidates.h"

using namespace outrider;

// The structures mirror those of structs.py.
extern "C" {

struct LawRow {
  const void* logits;  // [vocabulary]
  double temperature;  // positive
  double* probs;       // of a row that is left whole: [vocabulary], with room for whole blocks; null where it is cut
  Cut cut;
  int64_t* ids;        // set where it is cut: `kept` ids, then as many probabilities
  int64_t kept;        // set
  int32_t type;        // of the logits: 0 bfloat16, 1 float32, 2 float64
  int32_t outcome;     // set, one of these:
};

enum Outcome : int32_t { kDone, kNoMemory, kNoneFinite };
}

namespace {

constexpr int64_t kRun = 16 * kBlock;    // tokens that are widened at once, and added up
constexpr int64_t kPerThread = 1 << 18;  // tokens that are worth another thread
// Candidates have at least 2 ** -kOctaves[n] of the highest weight; after the last of these, all above 0.
constexpr int kOctaves[] = {12, 16, 20, 24, 32, 48, 96, 192};

// What the computing of one row needs beside its results.
struct Scratch {
  void reserve(int64_t vocabulary) {
    const int64_t blocks = pieces(vocabulary, kBlock);
    weights = weights_memory.reserve(blocks * kBlock);
    peaks = peaks_memory.reserve(blocks);
    room.reserve(vocabulary);
  }

  double *weights, *peaks;  // [blocks * kBlock], [blocks]
  Room room;
  Memory<double> weights_memory, peaks_memory;
};

// Not a number where one of them is none.
template <class S>
double highest_of(const S* from, int64_t count) {
  using E = Element<S>;
  using V = typename E::V;
  V top = V{} - std::numeric_limits<typename E::C>::infinity();
  decltype(top != top) none = {};
  int64_t at = 0;
  for (; at + E::lanes <= count; at += E::lanes) {
    const V v = E::load(from + at);
    none |= v != v;
    top = v > top ? v : top;
  }
  double highest = -std::numeric_limits<double>::infinity();
  for (int i = 0; i < E::lanes; ++i) {
    if (none[i]) return std::numeric_limits<double>::quiet_NaN();
    highest = std::max(highest, double(top[i]));
  }
  for (; at < count; ++at) {
    const double value = E::get(from[at]);
    if (std::isnan(value)) return value;
    highest = std::max(highest, value);
  }
  return highest;
}

// Weights relative to the highest, and the highest of each block; returns their sum. Not inlined: two copies could
// be rounded in two ways.
__attribute__((noinline)) double weigh(const double* logits, int64_t blocks, double highest, double temperature,
                                       double* weights, double* peaks) {
  using E = Element<double>;
  f64v added = {};
  for (int64_t block = 0; block < blocks; ++block) {
    f64v peak = {};
    for (int64_t at = block * kBlock; at < (block + 1) * kBlock; at += E::lanes) {
      const f64v weight = exp((E::load(logits + at) - highest) / temperature);
      E::store(weights + at, weight);
      peak = weight > peak ? weight : peak;
      added += weight;
    }
    for (int distance = E::lanes / 2; distance > 0; distance /= 2) {
      const f64v other = exchanged(peak, distance);
      peak = other > peak ? other : peak;
    }
    peaks[block] = peak[0];
  }
  return sum(added);
}

void cut(LawRow& row, Candidates& candidates) {
  bool enough = false;
  for (int n = 0; !enough && n < int(std::size(kOctaves)); ++n) {
    const double lowest = std::ldexp(1.0, -kOctaves[n]);
    candidates.widen(lowest);
    enough = outrider::enough(candidates, row.cut, lowest);
  }
  if (!enough) candidates.widen(std::numeric_limits<double>::denorm_min());
  candidates.spread();
  double mass = 0;
  const int64_t kept = kept_of(candidates, row.cut, mass);
  row.ids = static_cast<int64_t*>(std::malloc(kept * (sizeof(int64_t) + sizeof(double))));
  if (!row.ids) {
    row.outcome = kNoMemory;
    return;
  }
  double* probs = reinterpret_cast<double*>(row.ids + kept);
  for (int64_t i = 0; i < kept; ++i) {
    row.ids[i] = candidates[i].id;
    probs[i] = candidates[i].prob / mass;
  }
  row.kept = kept;
}

template <class S>
void law(LawRow& row, int64_t vocabulary, Scratch& scratch) {
  using E = Element<double>;
  const S* from = static_cast<const S*>(row.logits);
  const double highest = highest_of(from, vocabulary);
  if (!std::isfinite(highest)) {
    row.outcome = kNoneFinite;
    return;
  }
  double* const weights = row.probs ? row.probs : scratch.weights;
  alignas(kBytes) double logits[kRun];
  double total = 0;
  for (int64_t at = 0; at < vocabulary; at += kRun) {
    const int64_t count = std::min(kRun, vocabulary - at), blocks = pieces(count, kBlock);
    for (int64_t i = 0; i < count; ++i) logits[i] = Element<S>::get(from[at + i]);
    std::fill(logits + count, logits + blocks * kBlock, -std::numeric_limits<double>::infinity());
    total += weigh(logits, blocks, highest, row.temperature, weights + at, scratch.peaks + at / kBlock);
  }
  const int64_t blocks = pieces(vocabulary, kBlock);
  if (row.probs) {
    for (int64_t at = 0; at < blocks * kBlock; at += E::lanes) E::store(weights + at, E::load(weights + at) / total);
  } else {
    Candidates candidates(scratch.room, weights, scratch.peaks, blocks, total);
    cut(row, candidates);
  }
}

void laws(LawRow* rows, int64_t count, int64_t vocabulary, int threads) {
  thread_local std::vector<Scratch> memory;
  if (int64_t(memory.size()) < threads) memory.resize(threads);
  for (int n = 0; n < threads; ++n) memory[n].reserve(vocabulary);
  Scratch* const scratch = memory.data();
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int64_t n = 0; n < count; ++n) {
    Scratch& own = scratch[omp_get_thread_num()];
    switch (rows[n].type) {
      case 0: law<bf16>(rows[n], vocabulary, own); break;
      case 1: law<float>(rows[n], vocabulary, own); break;
      default: law<double>(rows[n], vocabulary, own);
    }
  }
}

}  // namespace

extern "C" {

// Sets what a row says is set; `outrider_law_close` frees it, whatever came out. Returns the worst outcome.
OUTRIDER_EXPORT int outrider_law(LawRow* rows, int64_t count, int64_t vocabulary, int threads) {
  try {
    laws(rows, count, vocabulary, int(std::clamp(count * vocabulary / kPerThread, int64_t(1), int64_t(threads))));
  } catch (const std::bad_alloc&) {
    return kNoMemory;
  }
  int outcome = kDone;
  for (int64_t n = 0; n < count; ++n) outcome = std::max(outcome, int(rows[n].outcome));
  return outcome;
}

OUTRIDER_EXPORT void outrider_law_close(LawRow* rows, int64_t count) {
  for (int64_t n = 0; n < count; ++n) std::free(std::exchange(rows[n].ids, nullptr));
}
}
