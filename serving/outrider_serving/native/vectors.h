// Vectors of 64 bytes over the element types of models, and what is computed with them.
//
// GCC's vector extensions are used throughout: they become whatever the machine has. Only the dot product of
// bfloat16 is written for one instruction set.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

// What Python calls.
#define OUTRIDER_EXPORT __attribute__((visibility("default")))

namespace outrider {

constexpr int kBytes = 64;

// How many pieces of `size` hold `count`.
inline int64_t pieces(int64_t count, int64_t size) { return (count + size - 1) / size; }

struct bf16 {
  uint16_t bits;
};

typedef float f32v __attribute__((vector_size(kBytes)));
typedef double f64v __attribute__((vector_size(kBytes)));
typedef int32_t i32v __attribute__((vector_size(kBytes)));
typedef uint32_t u32v __attribute__((vector_size(kBytes)));
typedef int64_t i64v __attribute__((vector_size(kBytes)));
typedef uint16_t u16v __attribute__((vector_size(kBytes)));
typedef uint16_t u16half __attribute__((vector_size(kBytes / 2)));

// a * b + c in the one way that vectors of a * b + c are computed: compilers round loops of scalars in several.
template <class C>
inline C fused(C a, C b, C c) {
#if defined(__FMA__) || defined(__aarch64__)
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

// 2 ** -25 relative, as far as results are normal; 0 below, so exp of -infinity is 0.
inline f32v exp(f32v x) {
  const f32v top = f32v{} + 88.0f, bottom = f32v{} - 87.0f;
  const f32v within = x > top ? top : (x < bottom ? bottom : x);
  const float magic = 12582912.0f;  // 1.5 * 2 ** 23: adding it rounds to whole numbers
  const f32v n = (within * 1.44269504088896341f + magic) - magic;
  const f32v r = (within - n * 0.693359375f) + n * 2.12194440e-4f;
  f32v p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const i32v shift = __builtin_convertvector(n, i32v) << 23;
  const f32v y = (f32v)((i32v)p + shift);
  return x < bottom ? f32v{} : y;
}

// Within 1 unit in the last place, and so where results are subnormal; infinite where std::exp is.
inline f64v exp(f64v x) {
  const f64v top = f64v{} + 709.782712893384, bottom = f64v{} - 746.0;  // below it everything rounds to 0
  const f64v within = x > top ? top : (x < bottom ? bottom : x);
  const double magic = 6755399441055744.0;  // 1.5 * 2 ** 52: adding it rounds to whole numbers, in the last bits
  const f64v shifted = within * 1.44269504088896340736 + magic;
  const f64v n = shifted - magic;
  const f64v r = (within - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  f64v p = r * (1.0 / 6227020800) + 1.0 / 479001600;  // the series: what is left out is below 2 ** -57
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * (r * r) + r + 1.0;
  const i64v small = within < -708.0;  // two steps, of which the second may round
  const f64v y = (f64v)((i64v)p + (((i64v)shifted + (small & 128)) << 52)) * (small ? f64v{} + 0x1p-128 : f64v{} + 1.0);
  return x > top ? f64v{} + std::numeric_limits<double>::infinity() : (x == x ? y : x);
}

template <class V>
inline V tanh(V x) {
  // Through exp of what is not positive, which cannot overflow.
  const V size = x < 0 ? -x : x;
  const V e = exp(size * -2);
  const V y = (1 - e) / (1 + e);
  return x < 0 ? -y : y;
}

// What is known of an element type S: C is computed in, V are lanes of C, W is what a step of `dot` takes.
template <class S>
struct Element;

template <class S, class Vector>
struct Plain {  // computed in as it is stored
  using C = S;
  using V = Vector;
  using W = Vector;
  static constexpr int lanes = kBytes / sizeof(S), step = lanes;
  static V dot(V sum, W a, W b) { return sum + a * b; }
  static V load(const S* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
  static W operand(const S* from) { return load(from); }
  static void store(S* to, V v) { std::memcpy(to, &v, sizeof v); }
  static C get(S x) { return x; }
  static S put(C x) { return x; }
  static V rounded(V v) { return v; }
};

template <>
struct Element<float> : Plain<float, f32v> {};

template <>
struct Element<double> : Plain<double, f64v> {};

template <>
struct Element<bf16> {
  using C = float;
  using V = f32v;
  static constexpr int lanes = 16, step = 32;
#ifdef __AVX512BF16__
  using W = __m512bh;
  static W operand(const bf16* from) { return (W)_mm512_loadu_si512(from); }
  static V dot(V sum, W a, W b) { return (V)_mm512_dpbf16_ps((__m512)sum, a, b); }
#else
  using W = u32v;
  static W operand(const bf16* from) {
    W w;
    std::memcpy(&w, from, sizeof w);
    return w;
  }
  static V dot(V sum, W a, W b) {
    sum += (f32v)(a << 16) * (f32v)(b << 16);
    return sum + (f32v)(a & 0xffff0000u) * (f32v)(b & 0xffff0000u);
  }
#endif
  static V load(const bf16* from) {
    u16half v;
    std::memcpy(&v, from, sizeof v);
    return (V)(__builtin_convertvector(v, u32v) << 16);
  }
  static u32v upper(V v) {  // rounded to the nearest, ties to even; NaN stays one
    const u32v bits = (u32v)v;
    const u32v up = bits + 0x7fff + ((bits >> 16) & 1);
    return (bits & 0x7fffffff) > 0x7f800000u ? bits | 0x400000u : up;
  }
  static void store(bf16* to, V v) {
    const u16half half = __builtin_convertvector(upper(v) >> 16, u16half);
    std::memcpy(to, &half, sizeof half);
  }
  static C get(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    C value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  static bf16 put(C x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    bits = nan ? bits | 0x400000u : bits + 0x7fff + ((bits >> 16) & 1);
    return bf16{uint16_t(bits >> 16)};
  }
  static V rounded(V v) { return (V)(upper(v) & 0xffff0000u); }
};

template <class V>
inline V exchanged(V v, int distance);

template <>
inline f32v exchanged(f32v v, int distance) {
  const i32v lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return __builtin_shuffle(v, lane ^ distance);
}

template <>
inline f64v exchanged(f64v v, int distance) {
  const i64v lane = {0, 1, 2, 3, 4, 5, 6, 7};
  return __builtin_shuffle(v, lane ^ int64_t(distance));
}

// Lanes of a where the bit `distance` of their number is clear, of b where it is set.
inline f32v blended(f32v a, f32v b, int distance) {
  const i32v lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return (lane & distance) != 0 ? b : a;
}

inline f64v blended(f64v a, f64v b, int distance) {
  const i64v lane = {0, 1, 2, 3, 4, 5, 6, 7};
  return (lane & int64_t(distance)) != 0 ? b : a;
}

// The sums of `count` vectors, in the first lanes times `lanes / count`. Each is added up in the same order,
// whatever `count`: halves, quarters, and so on. `count` is a power of 2 up to the number of lanes.
template <class V, int count>
inline void sums(V (&v)[count], V& out) {
  constexpr int lanes = kBytes / sizeof(v[0][0]);
  int left = count;
#pragma GCC unroll 8
  for (int distance = lanes / 2; distance > 0; distance /= 2) {
    if (left > 1) {
      left /= 2;
#pragma GCC unroll 16
      for (int i = 0; i < left; ++i) {
        const V a = v[i], b = v[i + left];
        v[i] = blended(a, b, distance) + exchanged(blended(b, a, distance), distance);
      }
    } else {
      v[0] = v[0] + exchanged(v[0], distance);
    }
  }
  out = v[0];
}

template <class V>
inline auto sum(V v) {
  V one[1] = {v}, out;
  sums<V, 1>(one, out);
  return out[0];
}

}  // namespace outrider
