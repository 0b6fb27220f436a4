// The token that noise chooses from a whole vocabulary; what `sampling.compiled` in Python drives.

#include <algorithm>
#include <cmath>

#include "vectors.h"

using namespace outrider;

extern "C" {

// Mirrors that of structs.py.
struct ClockRow {
  const double* probs;  // [vocabulary]
  uint64_t start, gamma;
  int64_t token;  // set
};
}

namespace {

constexpr int64_t kBlock = 64;           // tokens that are looked at at once
constexpr int64_t kPerThread = 1 << 20;  // tokens that are worth another thread
constexpr double kSlack = 1e-9;          // far more than a logarithm is wrong by

typedef uint64_t u64v __attribute__((vector_size(kBytes)));

// Uniform variates of the words; see `noise.exponentials`.
f64v variates(u64v word) {
  word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
  word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
  word ^= word >> 31;
  const f64v v = (__builtin_convertvector((i64v)(word >> 1), f64v) + 0.5) * 0x1p-63;
  const f64v highest = f64v{} + (1 - 0x1p-53);
  return v > highest ? highest : v;
}

// The token whose clock rings first. A clock rings at -log1p(-v) / p, not before v / p: that rules out most tokens
// without a logarithm.
int64_t first_to_ring(const ClockRow& row, int64_t vocabulary) {
  using E = Element<double>;
  int64_t token = 0;
  double first = std::numeric_limits<double>::infinity(), limit = first;
  u64v word = {1, 2, 3, 4, 5, 6, 7, 8};
  word = word * row.gamma + row.start;
  for (int64_t block = 0; block < vocabulary; block += kBlock) {
    const int64_t count = std::min(kBlock, vocabulary - block);
    alignas(kBytes) double v[kBlock], padded[kBlock];
    const double* probs = row.probs + block;
    if (count < kBlock) {
      std::fill(std::copy(probs, probs + count, padded), padded + kBlock, 0.0);
      probs = padded;
    }
    i64v early = {};
    for (int at = 0; at < kBlock; at += E::lanes, word += row.gamma * E::lanes) {
      const f64v variate = variates(word);
      E::store(v + at, variate);
      early |= variate <= E::load(probs + at) * limit;
    }
    for (int distance = E::lanes / 2; distance > 0; distance /= 2) early |= (i64v)exchanged((f64v)early, distance);
    if (!early[0]) continue;
    for (int i = 0; i < count; ++i) {
      if (!(v[i] <= probs[i] * limit)) continue;
      const double at = -std::log1p(-v[i]) / probs[i];
      if (!(at < first)) continue;
      first = at;
      limit = at * (1 + kSlack);
      token = block + i;
    }
  }
  return token;
}

}  // namespace

extern "C" {

// Sets the token of every row.
OUTRIDER_EXPORT void outrider_coupled(ClockRow* rows, int64_t count, int64_t vocabulary, int threads) {
  threads = int(std::clamp(count * vocabulary / kPerThread, int64_t(1), int64_t(threads)));
#pragma omp parallel for num_threads(threads)
  for (int64_t n = 0; n < count; ++n) rows[n].token = first_to_ring(rows[n], vocabulary);
}
}
