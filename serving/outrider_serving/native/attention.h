// Attention of new tokens over pages, by position.
//
// A query sees the tokens of its path: the context, and the new tokens that it follows. Keys are taken in the
// order of their positions, in chunks that begin at multiples of kChunk; each chunk has a softmax of its own,
// and chunks are merged in order (Milakov and Gimelshein 2018, arXiv 1805.02867). So the numbers of a token do
// not depend on the batch, on how its text was cut into passes, or on the slots where its keys lie.

#pragma once

#include <algorithm>

#include "product.h"

namespace outrider {

constexpr int64_t kChunk = 256;  // positions
constexpr int kQueryRows = 16;   // (query, head) pairs that share the reading of keys

// The part of a batch that belongs to one request; see `Segment` in target/batch.py.
struct Segment {
  int64_t first, count, context;
  const int64_t* slots;      // [context + count]
  const int64_t* positions;  // [count]
  const int64_t* paths;      // [count, count]: the slots of the new tokens that each one follows, itself last;
                             // null for a chain
};

struct Scoring {
  double scale, softcap;  // no cap where it is 0
  int64_t window;         // 0 for all
};

struct HeadShape {
  int64_t heads, key_heads, key_size, value_size;
};

// The state of one (query, head): highest score, sum of weights, weighted sum of values.
template <class C>
struct Softmax {
  C highest, sum;
  C* values;
};

template <class C>
inline void clear(Softmax<C>& state, int64_t size) {
  state.highest = -std::numeric_limits<C>::infinity();
  state.sum = 0;
  std::fill(state.values, state.values + size, C(0));
}

// Adds what a later chunk found. Not inlined, as `chunk` below: two copies could be rounded in two ways.
template <class C>
__attribute__((noinline)) void merge(Softmax<C>& state, const Softmax<C>& chunk, int64_t size) {
  if (chunk.sum == 0) return;
  if (state.sum == 0) {
    state.highest = chunk.highest;
    state.sum = chunk.sum;
    std::copy(chunk.values, chunk.values + size, state.values);
    return;
  }
  const C highest = std::max(state.highest, chunk.highest);
  const C ours = std::exp(state.highest - highest), theirs = std::exp(chunk.highest - highest);
  state.highest = highest;
  state.sum = state.sum * ours + chunk.sum * theirs;
  for (int64_t i = 0; i < size; ++i) state.values[i] = state.values[i] * ours + chunk.values[i] * theirs;
}

// What is attended together: some queries of one request, and some of the heads that share a head of keys. They
// see keys of the same slots, and are at most kQueryRows.
struct Sharing {
  int64_t key_head, first_head, heads, first, queries;
};

template <class S>
class Group {
 public:
  using E = Element<S>;
  using C = typename E::C;
  using V = typename E::V;

  // query: [tokens, heads, key size], of the whole batch; keys and values: the store of a layer.
  Group(const Segment& segment, const HeadShape& shape, const Scoring& scoring, const S* query, const S* keys,
        const S* values, const Sharing& sharing)
      : segment_(segment), shape_(shape), scoring_(scoring), query_(query), keys_(keys), values_(values),
        key_head_(sharing.key_head), first_head_(sharing.first_head), heads_(sharing.heads), first_(sharing.first),
        queries_(sharing.queries) {}

  int rows() const { return int(queries_ * heads_); }
  int64_t token(int row) const { return first_ + row / heads_; }
  int64_t head(int row) const { return first_head_ + row % heads_; }
  int64_t position(int row) const { return segment_.positions[token(row)]; }
  int64_t begin() const { return visible_from(position(0)) / kChunk; }
  int64_t end() const { return position(rows() - 1) / kChunk + 1; }

  // One chunk, for every row: states[row].values has room for the values; `scores` for rows * kChunk.
  __attribute__((noinline)) void chunk(int64_t number, Softmax<C>* states, C* scores) const {
    const int64_t from = std::max(number * kChunk, visible_from(position(0)) / E::lanes * E::lanes);
    const int64_t to = std::min((number + 1) * kChunk, position(rows() - 1) + 1);
    const int count = int(to - from), padded = (count + E::lanes - 1) / E::lanes * E::lanes;
    int64_t slots[kChunk];
    for (int i = 0; i < count; ++i) slots[i] = slot(from + i);
    score(slots, count, scores);
    for (int row = 0; row < rows(); ++row) weigh(row, from, count, padded, scores + row * kChunk, states[row]);
    for (int row = 0; row < rows(); row += 8) add_values(slots, count, scores, states, row, std::min(8, rows() - row));
  }

 private:
  int64_t visible_from(int64_t position) const {
    return scoring_.window ? std::max(int64_t(0), position - scoring_.window + 1) : 0;
  }

  int64_t slot(int64_t position) const {
    if (segment_.paths == nullptr || position < segment_.context) return segment_.slots[position];
    return segment_.paths[first_ * segment_.count + position - segment_.context];
  }

  void score(const int64_t* slots, int count, C* scores) const {
    const int64_t stride = shape_.key_heads * shape_.key_size;
    const S* keys = keys_ + key_head_ * shape_.key_size;
    for (int at = 0; at < count; at += 4) {
      const auto key = [&](int i) { return keys + slots[std::min(at + i, count - 1)] * stride; };
      for (int row = 0; row < rows(); row += 4) {
        const auto query = [&](int i) {
          return query_ + ((segment_.first + token(row + i)) * shape_.heads + head(row + i)) * shape_.key_size;
        };
        alignas(kBytes) C out[16];
        switch (std::min(4, rows() - row)) {
          case 1: put<1>(key, query, out, scores + row * kChunk + at); break;
          case 2: put<2>(key, query, out, scores + row * kChunk + at); break;
          case 3: put<3>(key, query, out, scores + row * kChunk + at); break;
          default: put<4>(key, query, out, scores + row * kChunk + at);
        }
      }
    }
  }

  template <int M, class Key, class Query>
  void put(Key key, Query query, C* out, C* scores) const {
    tile<S, 4, M>(key, query, shape_.key_size, out);
    for (int m = 0; m < M; ++m) std::memcpy(scores + m * kChunk, out + m * 4, 4 * sizeof(C));
  }

  // Scores become weights, 0 where the row does not see; the state gets their highest score and their sum.
  void weigh(int row, int64_t from, int count, int padded, C* scores, Softmax<C>& state) const {
    const int64_t last = position(row) - from, first = visible_from(position(row)) - from;
    const C nothing = -std::numeric_limits<C>::infinity();
    for (int i = 0; i < padded; i += E::lanes) {
      V s = Element<C>::load(scores + i) * C(scoring_.scale);
      if (scoring_.softcap != 0) s = tanh(s / C(scoring_.softcap)) * C(scoring_.softcap);
      Element<C>::store(scores + i, s);
    }
    for (int64_t i = 0; i < std::min(int64_t(padded), first); ++i) scores[i] = nothing;
    for (int64_t i = std::max(int64_t(0), std::min(int64_t(count), last + 1)); i < padded; ++i) scores[i] = nothing;
    V each = V{} + nothing;
    for (int i = 0; i < padded; i += E::lanes) {
      const V s = Element<C>::load(scores + i);
      each = s > each ? s : each;
    }
    C highest = nothing;
    for (int i = 0; i < E::lanes; ++i) highest = std::max(highest, each[i]);
    state.highest = highest;
    state.sum = 0;
    if (highest == nothing) {
      std::fill(scores, scores + padded, C(0));
      return;
    }
    V sums = {};
    for (int i = 0; i < padded; i += E::lanes) {
      const V weight = exp(Element<C>::load(scores + i) - highest);
      Element<C>::store(scores + i, weight);
      sums += weight;
    }
    state.sum = sum(sums);
  }

  void add_values(const int64_t* slots, int count, const C* scores, Softmax<C>* states, int row, int rows) const {
    switch (rows) {
      case 1: weighted<1>(slots, count, scores, states, row); break;
      case 2: weighted<2>(slots, count, scores, states, row); break;
      case 3: weighted<3>(slots, count, scores, states, row); break;
      case 4: weighted<4>(slots, count, scores, states, row); break;
      case 5: weighted<5>(slots, count, scores, states, row); break;
      case 6: weighted<6>(slots, count, scores, states, row); break;
      case 7: weighted<7>(slots, count, scores, states, row); break;
      default: weighted<8>(slots, count, scores, states, row);
    }
  }

  template <int M>
  void weighted(const int64_t* slots, int count, const C* scores, Softmax<C>* states, int row) const {
    const int64_t size = shape_.value_size;
    int64_t at = 0;
    constexpr int width = M > 4 ? 2 : 4;
    for (; at + width * E::lanes <= size; at += width * E::lanes) part<M, width>(slots, count, scores, states, row, at);
    for (; at + E::lanes <= size; at += E::lanes) part<M, 1>(slots, count, scores, states, row, at);
    for (; at < size; ++at) {
      for (int m = 0; m < M; ++m) {
        C added = 0;
        for (int i = 0; i < count; ++i) added = fused(E::get(value(slots[i])[at]), scores[(row + m) * kChunk + i], added);
        states[row + m].values[at] = added;
      }
    }
  }

  // The elements from `at` on, as many as `width` vectors have.
  template <int M, int width>
  void part(const int64_t* slots, int count, const C* scores, Softmax<C>* states, int row, int64_t at) const {
    V sums[M][width];
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int j = 0; j < width; ++j) sums[m][j] = V{};
    for (int i = 0; i < count; ++i) {
      V loaded[width];
#pragma GCC unroll 4
      for (int j = 0; j < width; ++j) loaded[j] = E::load(value(slots[i]) + at + j * E::lanes);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
        for (int j = 0; j < width; ++j) sums[m][j] += loaded[j] * scores[(row + m) * kChunk + i];
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int j = 0; j < width; ++j) Element<C>::store(states[row + m].values + at + j * E::lanes, sums[m][j]);
  }

  const S* value(int64_t slot) const { return values_ + (slot * shape_.key_heads + key_head_) * shape_.value_size; }

  const Segment& segment_;
  const HeadShape& shape_;
  const Scoring& scoring_;
  const S *query_, *keys_, *values_;
  int64_t key_head_, first_head_, heads_, first_, queries_;
};

}  // namespace outrider
