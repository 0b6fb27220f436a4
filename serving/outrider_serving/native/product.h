// Products of rows with rows, x @ w.T, on weights as they lie in a checkpoint.
//
// Each result is one dot product, added up in an order that only its length decides: so a token's numbers are
// the same to the last bit whatever else is in the batch. Nothing is packed: a model that is mapped from a file
// is served from there.

#pragma once

#include <algorithm>
#include <bit>

#include "vectors.h"

namespace outrider {

constexpr int kRows = 16;                // rows of w in a block
constexpr int kAhead = 32;               // rows between what is computed with and what is fetched
constexpr int kTile = 4;                 // rows of w, and at most as many of x, whose products are made at once
constexpr int kTogether = 4 * kTile;     // most rows of x that a block's rows are used for in a row
constexpr int64_t kNear = 36 << 10;      // bytes of x that stay in the nearest cache meanwhile

// The rows of w that a tile brings nearer while it computes, as the processor does not do that by itself: each
// of the first `turns` tiles that use the same rows of w fetches a share of them, so that memory is always busy.
// Turns are a power of 2: else shares would end within lines. `lines` are fetched in a step, one in each of so
// many rows.
template <class S, int lines>
struct Fetch {
  const S* from;
  int64_t stride;

  Fetch(const S* w, int64_t k, int64_t turn, int64_t turns) : from(w + kAhead * k), stride(Element<S>::step) {
    if (lines == 1) {
      from += turn * kTile * k / turns;
      stride = kTile * stride / turns;
    } else {
      from += turn * lines * k;
    }
  }
};

template <class S>
struct Fetch<S, 0> {
  static constexpr const S* from = nullptr;
  static constexpr int64_t stride = 0;

  Fetch() = default;
  Fetch(const S*, int64_t, int64_t, int64_t) {}
};

// out[m * R + r]: the dot products of R rows with M columns, both of k elements. Always inlined: a call for
// each tile cost a sixth of the time of long prompts.
template <class S, int R, int M, int lines = 0, class Row, class Column>
__attribute__((always_inline)) inline void tile(Row row, Column column, int64_t k, typename Element<S>::C* out,
                                                const Fetch<S, lines>& fetch = {}) {
  using E = Element<S>;
  typename E::V sum[M * R];
#pragma GCC unroll 16
  for (int i = 0; i < M * R; ++i) sum[i] = typename E::V{};
  const S* ahead = fetch.from;
  const auto add = [&](auto weights, auto tokens) __attribute__((always_inline)) {
    typename E::W w[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      w[r] = E::operand(weights(r));
      if (r < lines) __builtin_prefetch(ahead + r * k);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const typename E::W x = E::operand(tokens(m));
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sum[m * R + r] = E::dot(sum[m * R + r], w[r], x);
    }
  };
  const int64_t whole = k - k % E::step;
  for (int64_t at = 0; at < whole; at += E::step) {
    add([&](int r) { return row(r) + at; }, [&](int m) { return column(m) + at; });
    if (lines) ahead += fetch.stride;
  }
  if (whole < k) {  // the rest, filled up with zeros; in one piece, as loops over sums would keep them in memory
    alignas(kBytes) S rest[R + M][E::step] = {};
    for (int r = 0; r < R; ++r) std::memcpy(rest[r], row(r) + whole, (k - whole) * sizeof(S));
    for (int m = 0; m < M; ++m) std::memcpy(rest[R + m], column(m) + whole, (k - whole) * sizeof(S));
    add([&](int r) { return rest[r]; }, [&](int m) { return rest[R + m]; });
  }
  constexpr int total = M * R, part = total < E::lanes ? total : E::lanes;
  constexpr int size = part <= 1 ? 1 : part <= 2 ? 2 : part <= 4 ? 4 : part <= 8 ? 8 : 16;
#pragma GCC unroll 4
  for (int first = 0; first < total; first += size) {
    typename E::V these[size] = {}, added;
#pragma GCC unroll 16
    for (int i = 0; i < size; ++i)
      if (first + i < total) these[i] = sum[first + i];
    sums<typename E::V, size>(these, added);
    if constexpr (size == E::lanes && total % size == 0) {
      std::memcpy(out + first, &added, sizeof added);
    } else {
      for (int i = 0; i < size; ++i)
        if (first + i < total) out[first + i] = added[i * (E::lanes / size)];
    }
  }
}

// out[m * kRows + r]: `rows` rows of w, which lie one after another, with `tiles` times M rows of x. The first
// of these tiles has turn number `turn` of `turns`; see Fetch.
template <class S, int M, int lines>
__attribute__((noinline)) void tiles(const S* w, int rows, int64_t k, const S* x, int64_t tiles, int64_t turn,
                                     int64_t turns, typename Element<S>::C* out) {
  int r = 0;
  for (; r + kTile <= rows; r += kTile) {
    const S* from = w + r * k;
    for (int64_t t = 0; t < tiles; ++t) {
      const S* with = x + t * M * k;
      typename Element<S>::C part[kTile * M];
      tile<S, kTile, M, lines>([=](int i) { return from + i * k; }, [=](int i) { return with + i * k; }, k, part,
                               Fetch<S, lines>(from, k, turn + t, turns));
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) std::memcpy(out + (t * M + m) * kRows + r, part + m * kTile, kTile * sizeof *part);
    }
  }
  for (; r < rows; ++r)
    for (int64_t m = 0; m < tiles * M; ++m)
      tile<S, 1, 1>([=](int) { return w + r * k; }, [=](int) { return x + m * k; }, k, out + m * kRows + r);
}

// out[m * kRows + r]: `rows` rows of w with `count` rows of x.
template <class S, int lines>
inline void products(const S* w, int rows, int64_t k, const S* x, int count, int64_t turn, int64_t turns,
                     typename Element<S>::C* out) {
  const int whole = count / kTile;
  if (whole) tiles<S, kTile, lines>(w, rows, k, x, whole, turn, turns, out);
  x += whole * kTile * k;
  out += whole * kTile * kRows;
  switch (count % kTile) {
    case 1: return tiles<S, 1, lines>(w, rows, k, x, 1, turn + whole, turns, out);
    case 2: return tiles<S, 2, lines>(w, rows, k, x, 1, turn + whole, turns, out);
    case 3: return tiles<S, 3, lines>(w, rows, k, x, 1, turn + whole, turns, out);
  }
}

// The products of the same block of N matrices with all `count` rows of x: calls done(m, out), where out[n] are
// those of row m with matrix n.
template <class S, int N, class Done>
inline void block(const S* const (&w)[N], int rows, int64_t k, const S* x, int64_t count, Done done) {
  using C = typename Element<S>::C;
  alignas(kBytes) C out[N][kTogether * kRows];
  const int64_t near = kNear / int64_t(k * sizeof(S)) / kTile * kTile;
  const int64_t turns = std::bit_floor(uint64_t(pieces(count, kTile)));
  const int together = int(std::clamp(near, int64_t(kTile), int64_t(kTogether)));
  for (int64_t first = 0; first < count; first += together) {
    const int now = int(std::min(count - first, int64_t(together)));
    const int fetch = int(std::clamp(turns * kTile - first, int64_t(0), int64_t(now)));  // so many rows' tiles do
    for (int n = 0; n < N; ++n) {
      const S* from = x + first * k;
      switch (turns) {
        case 1: products<S, 4>(w[n], rows, k, from, fetch, 0, turns, out[n]); break;
        case 2: products<S, 2>(w[n], rows, k, from, fetch, first / kTile, turns, out[n]); break;
        default: products<S, 1>(w[n], rows, k, from, fetch, first / kTile, turns, out[n]);
      }
      products<S, 0>(w[n], rows, k, from + fetch * k, now - fetch, 0, turns, out[n] + fetch * kRows);
    }
    for (int i = 0; i < now; ++i) {
      const C* products[N];
      for (int n = 0; n < N; ++n) products[n] = out[n] + i * kRows;
      done(first + i, products);
    }
  }
}

}  // namespace outrider
