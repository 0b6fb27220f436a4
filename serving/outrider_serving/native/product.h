// Products of rows with rows, x @ w.T, on weights as they lie in a checkpoint.
//
// Each result is one dot product, added up in an order that only its length decides: so a token's numbers are
// the same to the last bit whatever else is in the batch. Nothing is packed: a model that is mapped from a file
// is served from there.

#pragma once

#include "vectors.h"

namespace outrider {

constexpr int kRows = 16;   // rows of w in a block
constexpr int kAhead = 32;  // rows between what is computed with and what is fetched
constexpr int kFew = 48;    // up to so many rows of x, the weights' way from memory is what takes the time

// out[m * R + r]: the dot products of R rows with M columns, both of k elements. With `fetch`, what lies kAhead
// rows further on is brought nearer meanwhile: while it computes, the processor does not do that by itself.
template <class S, int R, int M, bool fetch = false, class Row, class Column>
inline void tile(Row row, Column column, int64_t k, typename Element<S>::C* out) {
  using E = Element<S>;
  typename E::V sum[M * R] = {};
  const int64_t whole = k - k % E::step;
  for (int64_t at = 0; at < whole; at += E::step) {
    typename E::W w[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      w[r] = E::operand(row(r) + at);
      if (fetch) __builtin_prefetch(row(r) + at + kAhead * k);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      const typename E::W x = E::operand(column(m) + at);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) sum[m * R + r] = E::dot(sum[m * R + r], w[r], x);
    }
  }
  if (whole < k) {  // the rest, filled up with zeros
    S a[E::step] = {}, b[E::step] = {};
    for (int m = 0; m < M; ++m) {
      std::memcpy(b, column(m) + whole, (k - whole) * sizeof(S));
      for (int r = 0; r < R; ++r) {
        std::memcpy(a, row(r) + whole, (k - whole) * sizeof(S));
        sum[m * R + r] = E::dot(sum[m * R + r], E::operand(a), E::operand(b));
      }
    }
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

// out[m * kRows + r]: kRows rows of w, which lie one after another, with M rows of x.
template <class S, int M, bool fetch>
inline void rows16(const S* w, int64_t k, const S* x, int64_t x_stride, typename Element<S>::C* out) {
  constexpr int R = 4;
  typename Element<S>::C part[R * M];
  for (int r = 0; r < kRows; r += R) {
    tile<S, R, M, fetch>([=](int i) { return w + (r + i) * k; }, [=](int i) { return x + i * x_stride; }, k, part);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) std::memcpy(out + m * kRows + r, part + m * R, R * sizeof *part);
  }
}

// The products of M rows of x with a block of at most kRows rows of w; see rows16.
template <class S, int M, bool fetch>
inline void some_rows(const S* w, int rows, int64_t k, const S* x, int64_t x_stride, typename Element<S>::C* out) {
  if (rows == kRows) return rows16<S, M, fetch>(w, k, x, x_stride, out);
  for (int m = 0; m < M; ++m)
    for (int r = 0; r < rows; ++r)
      tile<S, 1, 1>([=](int) { return w + r * k; }, [=](int) { return x + m * x_stride; }, k, out + m * kRows + r);
}

template <class S, bool fetch>
inline void few_rows(const S* w, int rows, int64_t k, const S* x, int64_t x_stride, int count,
                     typename Element<S>::C* out) {
  switch (count) {
    case 1: return some_rows<S, 1, fetch>(w, rows, k, x, x_stride, out);
    case 2: return some_rows<S, 2, fetch>(w, rows, k, x, x_stride, out);
    case 3: return some_rows<S, 3, fetch>(w, rows, k, x, x_stride, out);
    default: return some_rows<S, 4, fetch>(w, rows, k, x, x_stride, out);
  }
}

// The products of the same block of N matrices with all `count` rows of x: calls done(m, out), where out[n] are
// those of row m with matrix n.
template <class S, int N, class Done>
inline void block(const S* const (&w)[N], int rows, int64_t k, const S* x, int64_t x_stride, int64_t count, Done done) {
  using C = typename Element<S>::C;
  alignas(kBytes) C out[N][4 * kRows];
  for (int64_t m = 0; m < count; m += 4) {
    const int now = count - m < 4 ? int(count - m) : 4;
    const S* from = x + m * x_stride;
    for (int n = 0; n < N; ++n) {
      if (count <= kFew) few_rows<S, true>(w[n], rows, k, from, x_stride, now, out[n]);
      else few_rows<S, false>(w[n], rows, k, from, x_stride, now, out[n]);
    }
    for (int i = 0; i < now; ++i) {
      const C* products[N];
      for (int n = 0; n < N; ++n) products[n] = out[n] + i * kRows;
      done(m + i, products);
    }
  }
}

}  // namespace outrider
