// One vector of 16 floats on every machine, and how numbers of each stored type are read, multiplied and written.
//
// `V` is one 512-bit register, two of 256 bits or four of 128 bits, by what the compiler was told to build for. All
// arithmetic is done on whole vectors, ends of rows included, so the bits of an element do not depend on its lane. A
// multiplication and an addition are fused only where `fma` says so (build with -ffp-contract=off).
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#pragma GCC diagnostic push
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC bug 105593: false alarms from inside this header
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define CL_INLINE inline __attribute__((always_inline))
#define CL_INLINE_LAMBDA __attribute__((always_inline))

namespace cl {

inline constexpr int kLanes = 16;

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512BF16__)
#define CL_AVX512 1
#define CL_AVX512_BF16 1
inline constexpr const char *kIsa = "avx512_bf16";
#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define CL_AVX512 1
inline constexpr const char *kIsa = "avx512";
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define CL_AVX2 1
inline constexpr const char *kIsa = "avx2";
#elif defined(__aarch64__)
inline constexpr const char *kIsa = "neon";
#else
inline constexpr const char *kIsa = "portable";
#endif

// Register: one hardware vector ------------------------------------------------------------------------------------

#if defined(CL_AVX512)
inline constexpr int kRegisterLanes = 16;
#elif defined(CL_AVX2)
inline constexpr int kRegisterLanes = 8;
#else
inline constexpr int kRegisterLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kRegisterLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kRegisterLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kRegisterLanes)));
typedef uint16_t Halfwords __attribute__((vector_size(2 * kRegisterLanes)));

struct Register {
  static constexpr int lanes = kRegisterLanes;
  Floats r;
};

CL_INLINE Register operator+(Register a, Register b) { return {a.r + b.r}; }
CL_INLINE Register operator-(Register a, Register b) { return {a.r - b.r}; }
CL_INLINE Register operator*(Register a, Register b) { return {a.r * b.r}; }
CL_INLINE Register operator/(Register a, Register b) { return {a.r / b.r}; }

// a * b + c, rounded once where the machine can.
CL_INLINE Register fma(Register a, Register b, Register c) {
#if defined(CL_AVX512)
  return {_mm512_fmadd_ps(a.r, b.r, c.r)};
#elif defined(CL_AVX2)
  return {_mm256_fmadd_ps(a.r, b.r, c.r)};
#elif defined(__aarch64__)
  return {(Floats)vfmaq_f32((float32x4_t)c.r, (float32x4_t)a.r, (float32x4_t)b.r)};
#else
  return {a.r * b.r + c.r};
#endif
}

// The larger and the smaller; b where either is NaN.
CL_INLINE Register max(Register a, Register b) {
#if defined(CL_AVX512)
  return {_mm512_max_ps(a.r, b.r)};
#elif defined(CL_AVX2)
  return {_mm256_max_ps(a.r, b.r)};
#else
  return {a.r > b.r ? a.r : b.r};
#endif
}
CL_INLINE Register min(Register a, Register b) {
#if defined(CL_AVX512)
  return {_mm512_min_ps(a.r, b.r)};
#elif defined(CL_AVX2)
  return {_mm256_min_ps(a.r, b.r)};
#else
  return {a.r < b.r ? a.r : b.r};
#endif
}

// Lane by lane: a < b ? yes : no.
CL_INLINE Register where_less(Register a, Register b, Register yes, Register no) {
  return {a.r < b.r ? yes.r : no.r};
}

// NaN where v is, elsewhere `other`.
CL_INLINE Register nan_or(Register v, Register other) { return {v.r == v.r ? other.r : v.r}; }

// Bit i: lane i of v is at least as large as that of bound; no NaN is.
CL_INLINE uint32_t at_least(Register v, Register bound) {
#if defined(CL_AVX512)
  return _mm512_cmp_ps_mask((__m512)v.r, (__m512)bound.r, _CMP_GE_OQ);
#elif defined(CL_AVX2)
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps((__m256)v.r, (__m256)bound.r, _CMP_GE_OQ)));
#else
  uint32_t bits = 0;
  for (int i = 0; i < Register::lanes; i++) bits |= static_cast<uint32_t>(v.r[i] >= bound.r[i]) << i;
  return bits;
#endif
}

CL_INLINE Register abs(Register a) { return {(Floats)((Words)a.r & 0x7fffffffu)}; }

// The magnitude of a with the sign of b.
CL_INLINE Register copy_sign(Register a, Register b) {
  return {(Floats)(((Words)a.r & 0x7fffffffu) | ((Words)b.r & 0x80000000u))};
}

// a * 2^n for whole numbers n in [-150, 128]. Below the normal floats the result may be 0.
CL_INLINE Register scale_by_power(Register a, Register n) {
#if defined(CL_AVX512)
  return {_mm512_scalef_ps(a.r, n.r)};
#else
  // Two factors, because 2^n alone need not be a float.
  Ints whole = __builtin_convertvector(n.r, Ints), half = whole >> 1;
  return {a.r * (Floats)((half + 127) << 23) * (Floats)((whole - half + 127) << 23)};
#endif
}

CL_INLINE void spread(Register &v, float x) {
#if defined(CL_AVX512)
  v.r = _mm512_set1_ps(x);
#elif defined(CL_AVX2)
  v.r = _mm256_set1_ps(x);
#else
  v.r = Floats{x, x, x, x};
#endif
}

// Reading. bf16 and f16 become floats exactly.

CL_INLINE void read(Register &v, const float *p) { memcpy(&v.r, p, sizeof v.r); }

CL_INLINE Words widened(Halfwords h) {
#if defined(CL_AVX512)
  return (Words)_mm512_cvtepu16_epi32((__m256i)h);  // GCC would do it in halves
#else
  return __builtin_convertvector(h, Words);
#endif
}

CL_INLINE Words read_halfwords(const void *p) {
  Halfwords h;
  memcpy(&h, p, sizeof h);
  return widened(h);
}

// Two rows of numbers, side by side: a[0], b[0], a[1], ...
CL_INLINE void write_pairs(bf16 *p, const bf16 *a, const bf16 *b) {
  for (int i = 0; i < kLanes; i += kRegisterLanes) {
    Words pairs = read_halfwords(a + i) | read_halfwords(b + i) << 16;
    memcpy(p + 2 * i, &pairs, sizeof pairs);
  }
}

CL_INLINE void read(Register &v, const bf16 *p) { v.r = (Floats)(read_halfwords(p) << 16); }

CL_INLINE void read(Register &v, const f16 *p) {
#if defined(CL_AVX512)
  v.r = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(CL_AVX2)
  v.r = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
  // The exponent is rebiased by a multiplication, which makes subnormal halves normal; that of infinity is set.
  Words half = read_halfwords(p), magnitude = (half & 0x7fffu) << 13;
  Words scaled = (Words)((Floats)magnitude * 0x1p112f);
  scaled |= (Words)(magnitude >= (31u << 23)) & 0x7f800000u;
  v.r = (Floats)(scaled | (half & 0x8000u) << 16);
#endif
}

// Writing, rounded to nearest even.

CL_INLINE void write(float *p, Register v) { memcpy(p, &v.r, sizeof v.r); }

CL_INLINE void write_halfwords(void *p, Words w) {
  Halfwords h = __builtin_convertvector(w, Halfwords);
  memcpy(p, &h, sizeof h);
}

CL_INLINE Words bf16_bits(Register v) {  // in the upper half of each word; the lower half is not cleared
  Words w = (Words)v.r;
  Words rounded = w + 0x7fffu + (w >> 16 & 1u);
  return v.r == v.r ? rounded : w | 0x400000u;
}

CL_INLINE void write(bf16 *p, Register v) {
#if defined(CL_AVX512_BF16)
  _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(v.r));
#else
  write_halfwords(p, bf16_bits(v) >> 16);
#endif
}

CL_INLINE void write(f16 *p, Register v) {
#if defined(CL_AVX512)
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(v.r, _MM_FROUND_TO_NEAREST_INT));
#elif defined(CL_AVX2)
  _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(v.r, _MM_FROUND_TO_NEAREST_INT));
#else
  Words w = (Words)v.r, sign = w & 0x80000000u, magnitude = w ^ sign;
  Words normal = magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u);
  Words subnormal = (Words)((Floats)magnitude + 0.5f) - (126u << 23);  // 0.5 aligns the last bits of a subnormal half
  Words half = magnitude < (113u << 23) ? subnormal : normal >> 13;
  half = magnitude >= (143u << 23) ? (magnitude > (255u << 23) ? half * 0 + 0x7e00u : half * 0 + 0x7c00u) : half;
  write_halfwords(p, half | sign >> 16);
#endif
}

CL_INLINE Register rounded(Register v, const float *) { return v; }
CL_INLINE Register rounded(Register v, const bf16 *) {
#if defined(CL_AVX512_BF16)
  return {(Floats)(widened((Halfwords)_mm512_cvtneps_pbh(v.r)) << 16)};
#else
  return {(Floats)(bf16_bits(v) & 0xffff0000u)};
#endif
}
CL_INLINE Register rounded(Register v, const f16 *) {
  f16 half[kRegisterLanes];
  write(half, v);
  read(v, half);
  return v;
}

// v with neighbouring groups of 8, 4, 2 lanes or single ones exchanged.
template <int group> CL_INLINE Register exchanged(Register v) {
#if defined(CL_AVX512)
  if (group == 8) return {_mm512_shuffle_f32x4(v.r, v.r, 0x4e)};
  if (group == 4) return {_mm512_shuffle_f32x4(v.r, v.r, 0xb1)};
  return {_mm512_permute_ps(v.r, group == 2 ? 0x4e : 0xb1)};
#elif defined(CL_AVX2)
  if (group == 4) return {_mm256_permute2f128_ps(v.r, v.r, 1)};
  return {_mm256_permute_ps(v.r, group == 2 ? 0x4e : 0xb1)};
#else
  return group == 2 ? Register{Floats{v.r[2], v.r[3], v.r[0], v.r[1]}} : Register{Floats{v.r[1], v.r[0], v.r[3], v.r[2]}};
#endif
}

// All lanes combined by f, the first half with the second until one is left.
template <int group = kRegisterLanes / 2, class F> CL_INLINE float folded(Register v, F &&f) {
  if constexpr (group > 0) {
    return folded<group / 2>(f(v, exchanged<group>(v)), f);
  } else {
    return v.r[0];
  }
}

// Two: twice the lanes ---------------------------------------------------------------------------------------------

template <class Half> struct Two {
  static constexpr int lanes = 2 * Half::lanes;
  Half low, high;
};

template <class H> CL_INLINE Two<H> operator+(Two<H> a, Two<H> b) { return {a.low + b.low, a.high + b.high}; }
template <class H> CL_INLINE Two<H> operator-(Two<H> a, Two<H> b) { return {a.low - b.low, a.high - b.high}; }
template <class H> CL_INLINE Two<H> operator*(Two<H> a, Two<H> b) { return {a.low * b.low, a.high * b.high}; }
template <class H> CL_INLINE Two<H> operator/(Two<H> a, Two<H> b) { return {a.low / b.low, a.high / b.high}; }
template <class H> CL_INLINE Two<H> fma(Two<H> a, Two<H> b, Two<H> c) {
  return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
}
template <class H> CL_INLINE Two<H> max(Two<H> a, Two<H> b) { return {max(a.low, b.low), max(a.high, b.high)}; }
template <class H> CL_INLINE Two<H> min(Two<H> a, Two<H> b) { return {min(a.low, b.low), min(a.high, b.high)}; }
template <class H> CL_INLINE Two<H> where_less(Two<H> a, Two<H> b, Two<H> yes, Two<H> no) {
  return {where_less(a.low, b.low, yes.low, no.low), where_less(a.high, b.high, yes.high, no.high)};
}
template <class H> CL_INLINE Two<H> nan_or(Two<H> v, Two<H> other) {
  return {nan_or(v.low, other.low), nan_or(v.high, other.high)};
}
template <class H> CL_INLINE uint32_t at_least(Two<H> v, Two<H> bound) {
  return at_least(v.low, bound.low) | at_least(v.high, bound.high) << H::lanes;
}
template <class H> CL_INLINE Two<H> abs(Two<H> a) { return {abs(a.low), abs(a.high)}; }
template <class H> CL_INLINE Two<H> copy_sign(Two<H> a, Two<H> b) {
  return {copy_sign(a.low, b.low), copy_sign(a.high, b.high)};
}
template <class H> CL_INLINE Two<H> scale_by_power(Two<H> a, Two<H> n) {
  return {scale_by_power(a.low, n.low), scale_by_power(a.high, n.high)};
}
template <class H> CL_INLINE void spread(Two<H> &v, float x) {
  spread(v.low, x);
  spread(v.high, x);
}
template <class H, class T> CL_INLINE void read(Two<H> &v, const T *p) {
  read(v.low, p);
  read(v.high, p + H::lanes);
}
template <class T, class H> CL_INLINE void write(T *p, Two<H> v) {
  write(p, v.low);
  write(p + H::lanes, v.high);
}
template <class H, class T> CL_INLINE Two<H> rounded(Two<H> v, const T *type) {
  return {rounded(v.low, type), rounded(v.high, type)};
}

template <class H, class F> CL_INLINE float folded(Two<H> v, F &&f) { return folded(f(v.low, v.high), f); }

// V: sixteen floats ------------------------------------------------------------------------------------------------

#if defined(CL_AVX512)
using V = Register;
#elif defined(CL_AVX2)
using V = Two<Register>;
#else
using V = Two<Two<Register>>;
#endif
static_assert(V::lanes == kLanes, "a vector has 16 lanes on every machine");

CL_INLINE V all(float x) {
  V v;
  spread(v, x);
  return v;
}

CL_INLINE V zero() { return all(0.0f); }

template <class T> CL_INLINE V load(const T *p) {
  V v;
  read(v, p);
  return v;
}

template <class T> CL_INLINE void store(T *p, V v) { write(p, v); }

// v as it would come back from memory of type T.
template <class T> CL_INLINE V round_to(V v) { return rounded(v, (const T *)nullptr); }

// The first n of 16 elements (0 < n); the other lanes read as 0, and are not touched by `store`.
template <class T> CL_INLINE V load(const T *p, int64_t n) {
  if (n >= kLanes) return load(p);
  T buffer[kLanes] = {};
  memcpy(buffer, p, (size_t)n * sizeof(T));
  return load(buffer);
}

template <class T> CL_INLINE void store(T *p, V v, int64_t n) {
  if (n >= kLanes) return store(p, v);
  T buffer[kLanes];
  store(buffer, v);
  memcpy(p, buffer, (size_t)n * sizeof(T));
}

// Calls f(column, lanes) for each vector of a row; `lanes` is a constant, except for the last one of an odd width.
template <class F> CL_INLINE void each_vector(int64_t width, F &&f) {
  int64_t column = 0;
  for (; column + kLanes <= width; column += kLanes) f(column, int64_t{kLanes});
  if (column < width) f(column, width - column);
}

alignas(64) inline constexpr float kLaneNumbers[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// The first n lanes of v (n may be negative or above 16), `rest` in the others.
CL_INLINE V first(int64_t n, V v, V rest) {
  if (n >= kLanes) return v;
  return where_less(load(kLaneNumbers), all((float)(n < 0 ? 0 : n)), v, rest);
}

// The sum and the largest of the lanes, always combined in the same order.
CL_INLINE float sum_of(V v) {
  return folded(v, [](auto a, auto b) { return a + b; });
}
CL_INLINE float max_of(V v) {
  return folded(v, [](auto a, auto b) { return max(a, b); });
}

// Functions --------------------------------------------------------------------------------------------------------
// Polynomials are minimax fits. Errors are below 2 units in the last place unless said otherwise.

template <int N> CL_INLINE V polynomial(const float (&coefficient)[N], V x) {  // from the constant term up
  V sum = all(coefficient[N - 1]);
#pragma GCC unroll 16
  for (int i = N - 2; i >= 0; i--) sum = fma(sum, x, all(coefficient[i]));
  return sum;
}

// The nearest whole number, for |x| < 2^22: there the last bit of x + 1.5 * 2^23 counts ones.
CL_INLINE V nearest(V x) {
  V magic = all(0x1.8p23f);
  return (x + magic) - magic;
}

// 2^x for x <= 127 by the polynomial for [-0.5, 0.5]; exactly 0 from -150 down, and for -infinity.
template <int N> CL_INLINE V exp2(const float (&coefficient)[N], V x) {
  x = max(all(-151.0f), x);
  V whole = nearest(x);
  return scale_by_power(polynomial(coefficient, x - whole), whole);
}

CL_INLINE V exp2(V x) {
  static constexpr float c[] = {1.0f,           0.693147206f,   0.240226469f,  0.0555032878f,
                                0.00961848896f, 0.00133999312f, 0.000153458116f};
  return exp2(c, x);
}

// The same for a result that is rounded to T: a relative error of 3e-6 is not seen behind 12 bits.
template <class T> CL_INLINE V exp2_for(V x) {
  static constexpr float c[] = {0.999999285f, 0.693121791f, 0.240247443f, 0.0559178591f, 0.00957010221f};
  return sizeof(T) < sizeof(float) ? exp2(c, x) : exp2(x);
}

// e^x for any x: 0 far below, infinity far above, NaN for NaN.
CL_INLINE V exp(V x) {
  static constexpr float c[] = {0.5f, 0.166666668f, 0.041666465f, 0.00833328602f, 0.00139336433f, 0.000199075736f};
  x = min(all(89.0f), max(all(-104.0f), x));
  V whole = nearest(x * all(1.44269504f));
  V f = fma(whole, all(-0.693359375f), x);  // ln 2 in two parts: the first has few bits, so this product is exact
  f = fma(whole, all(2.12194440e-4f), f);
  V e = fma(f * f, polynomial(c, f), f) + all(1.0f);
  return scale_by_power(e, whole);
}

// The same for a result that is rounded to T.
template <class T> CL_INLINE V exp_for(V x) {
  return sizeof(T) < sizeof(float) ? exp2_for<T>(min(all(128.0f), x * all(1.44269504f))) : exp(x);
}

CL_INLINE V tanh(V x) {
  static constexpr float c[] = {-0.333333332f, 0.13333305f,    -0.0539595503f,
                                0.0217709958f, -0.0083500083f, 0.00229894174f};
  V a = abs(x), square = x * x;
  V near = fma(x * square, polynomial(c, square), x);
  V far = all(1.0f) - all(2.0f) / (exp(a + a) + all(1.0f));
  return where_less(a, all(0.625f), near, copy_sign(far, x));
}

CL_INLINE V erf(V x) {
  static constexpr float c[] = {1.12837917f,    -0.376126258f,   0.112835851f,  -0.0268538119f,
                                0.00518832767f, -0.000801019351f, 7.85386097e-05f};
  static constexpr float d[] = {-0.000153187209f, 0.284896237f, 0.259801746f,  0.347360822f,
                                -0.10259222f,     0.561872793f, -0.470151524f, 0.119015978f};
  V a = abs(x), square = x * x;
  V near = x * polynomial(c, square);
  V bounded = min(all(4.0f), a);  // erf(4) is 1
  V t = all(1.0f) / fma(all(0.5f), bounded, all(1.0f));
  V far = all(1.0f) - exp(zero() - bounded * bounded) * polynomial(d, t);
  return where_less(a, all(1.0f), near, copy_sign(far, x));
}

// Multiplication of stored types -----------------------------------------------------------------------------------
//
// `Multiply<T>` multiplies sixteen columns of T, `depth` neighbouring rows of a matrix at a time, by `depth` numbers
// broadcast from the left. A right operand of n columns is stored as [rows / depth][n][depth]. Where the machine has
// no product of T, the left operand is float (`Left`), and the right one is widened when it is read.

template <class T> struct Multiply {
  static constexpr int depth = 1;
  using Left = float;
  using Right = V;
  static CL_INLINE Right load(const T *p) { return cl::load(p); }
  // sum + the product of `depth` numbers at `left` with sixteen columns
  static CL_INLINE V add(V sum, const Left *left, Right right) { return fma(all(*left), right, sum); }
  // the same with the first number at `left` alone, the others taken as 0 and not read
  static CL_INLINE V add_one(V sum, const Left *left, Right right) { return add(sum, left, right); }
};

template <> struct Multiply<bf16> {
  static constexpr int depth = 2;
#if defined(CL_AVX512_BF16)
  using Left = bf16;
  struct Right {
    __m512i pairs;
  };
  static CL_INLINE Right load(const bf16 *p) { return {_mm512_loadu_si512(p)}; }
  static CL_INLINE V add_pair(V sum, int32_t pair, Right right) {
    return {_mm512_dpbf16_ps(sum.r, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)right.pairs)};
  }
  static CL_INLINE V add(V sum, const Left *left, Right right) {
    int32_t pair;
    memcpy(&pair, left, sizeof pair);
    return add_pair(sum, pair, right);
  }
  static CL_INLINE V add_one(V sum, const Left *left, Right right) { return add_pair(sum, left->bits, right); }
#else
  using Left = float;
  struct Right {
    V even, odd;
  };
  static CL_INLINE void split(const bf16 *p, Register &even, Register &odd) {
    Words pairs;
    memcpy(&pairs, p, sizeof pairs);
    even.r = (Floats)(pairs << 16);
    odd.r = (Floats)(pairs & 0xffff0000u);
  }
  template <class H> static CL_INLINE void split(const bf16 *p, Two<H> &even, Two<H> &odd) {
    split(p, even.low, odd.low);
    split(p + 2 * H::lanes, even.high, odd.high);
  }
  static CL_INLINE Right load(const bf16 *p) {
    Right right;
    split(p, right.even, right.odd);
    return right;
  }
  static CL_INLINE V add(V sum, const Left *left, Right right) {
    return fma(all(left[1]), right.odd, fma(all(left[0]), right.even, sum));
  }
  static CL_INLINE V add_one(V sum, const Left *left, Right right) { return fma(all(left[0]), right.even, sum); }
#endif
};

// Prefetch for several uses or for a single one: such lines do not drive out what the last-level cache holds. Any address
// will do.
CL_INLINE void prefetch(const void *p) { __builtin_prefetch(p, 0, 3); }
CL_INLINE void prefetch_once(const void *p) { __builtin_prefetch(p, 0, 0); }

}  // namespace cl
