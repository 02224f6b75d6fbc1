// CL_ROPE_STORE: each new token's queries and keys are normalised (if asked), rotated in place, and its keys and values
// written to their slots.
#include <algorithm>

#include "cache.h"

namespace cl {
namespace {

constexpr int64_t kTaskElements = 4096;

struct Arguments {
  int64_t q_heads, kv_heads, head_dim, rotary_dim, q_stride, k_stride, v_stride, cos_stride, group, norm_flags;
  bool interleaved, by_position;

  explicit Arguments(const ClOp &op)
      : q_heads(op.n[0]), kv_heads(op.n[1]), head_dim(op.n[2]), rotary_dim(op.n[3]), q_stride(op.n[4]),
        k_stride(op.n[5]), v_stride(op.n[6]), cos_stride(op.n[7]), group(op.n[8]), norm_flags(op.n[9]),
        interleaved(op.n[10] != 0), by_position(op.n[11] != 0) {}

  int64_t tokens_per_task() const { return std::max<int64_t>(1, kTaskElements / ((q_heads + 2 * kv_heads) * head_dim)); }
};

Error check(const Phase &phase) {
  const ClOp &op = *phase.op;
  Arguments a(op);
  if (!op.p[0] || !op.p[1] || !op.p[2] || !op.p[7]) return kMissingPointer;
  if (a.rotary_dim && (!op.p[3] || !op.p[4])) return kMissingPointer;
  if (a.head_dim <= 0 || a.head_dim % 2 || a.rotary_dim % 2 || a.rotary_dim > a.head_dim) return kBadSize;
  return a.norm_flags & CL_LAYER_NORM ? kUnsupported : kOk;
}

int64_t split(Phase &phase) { return divide_up(phase.step->num_tokens, Arguments(*phase.op).tokens_per_task()); }

// RMS norm of one head, in place.
template <class T> void normalise(T *x, const T *weight, int64_t width, int64_t flags, float eps) {
  V squares = zero();
  for (int64_t i = 0; i < width; i += kLanes) {
    V v = load(x + i, width - i);
    squares = fma(v, v, squares);
  }
  V scale = all(1.0f / sqrtf(sum_of(squares) / static_cast<float>(width) + eps));
  for (int64_t i = 0; i < width; i += kLanes) {
    V v = load(x + i, width - i) * scale, w = load(weight + i, width - i);
    if (flags & CL_ROUND_FIRST) v = round_to<T>(v);
    store(x + i, v * (flags & CL_PLUS_ONE ? w + all(1.0f) : w), width - i);
  }
}

// Element i of each head is turned together with element i + dim / 2.
template <class T>
void rotate_halves(T *x, int64_t heads, int64_t head_dim, const T *cos, const T *sin, int64_t dim) {
  const int64_t half = dim / 2;
  each_vector(half, [&](int64_t i, int64_t n) CL_INLINE_LAMBDA {
    const V cos_low = load(cos + i, n), sin_low = load(sin + i, n);
    const V cos_high = load(cos + half + i, n), sin_high = load(sin + half + i, n);
    T *low = x + i;
    for (int64_t head = 0; head < heads; head++, low += head_dim) {
      V a = load(low, n), b = load(low + half, n);
      store(low, fma(a, cos_low, zero() - b * sin_low), n);
      store(low + half, fma(b, cos_high, a * sin_high), n);
    }
  });
}

// Element 2i is turned together with element 2i + 1.
template <class T> void rotate_pairs(T *x, const T *cos, const T *sin, int64_t dim) {
  for (int64_t i = 0; i < dim; i += kLanes) {
    int64_t n = dim - i;
    alignas(64) float lanes[kLanes], partners[kLanes];
    V v = load(x + i, n);
    store(lanes, v);
    for (int k = 0; k < kLanes; k += 2) {
      partners[k] = -lanes[k + 1];
      partners[k + 1] = lanes[k];
    }
    store(x + i, fma(v, load(cos + i, n), load(partners) * load(sin + i, n)), n);
  }
}

template <class T> void store_key(const T *key, T *unit, int64_t slot, int64_t dim) {
  constexpr int depth = Multiply<T>::depth;
  for (int64_t d = 0; d < dim; d += depth) memcpy(unit + d * kUnit + slot * depth, key + d, depth * sizeof(T));
}

template <class T> void store_value(const T *value, T *unit, int64_t slot, CacheShape shape) {
  constexpr int depth = Multiply<T>::depth;
  T *row = unit + slot / depth * depth * shape.columns() + slot % depth;
  for (int64_t d = 0; d < shape.head_dim; d++) row[d * depth] = value[d];
}

// The values of two tokens that `Multiply` takes together.
template <class T> void store_pair(const T *value, const T *next, T *unit, int64_t slot, CacheShape shape) {
  T *row = unit + slot * shape.columns();
  int64_t d = 0;
  for (; d + kLanes <= shape.head_dim; d += kLanes) write_pairs(row + 2 * d, value + d, next + d);
  for (; d < shape.head_dim; d++) row[2 * d] = value[d], row[2 * d + 1] = next[d];
}

const ClRequest &request_of(const ClStep &step, int64_t token) {
  const ClRequest *end = step.requests + step.num_requests;
  auto starts_behind = [](int64_t t, const ClRequest &request) { return t < request.start; };
  return *(std::upper_bound(step.requests, end, token, starts_behind) - 1);
}

template <class T> class Tokens {
 public:
  explicit Tokens(const Phase &phase) : phase_(phase), a_(*phase.op) {}

  void run(Range tokens) const {
    for (int64_t token = tokens.begin; token < tokens.end; token++) {
      const ClRequest &request = request_of(*phase_.step, token);
      const Range together = {std::max<int64_t>(tokens.begin, request.start),
                              std::min<int64_t>(tokens.end, request.start + request.count)};
      run(token, request, together);
    }
  }

 private:
  // `together`: tokens of the same request that the task has.
  void run(int64_t token, const ClRequest &request, Range together) const {
    int64_t position = request.position + token - request.start, slot = position % kUnit;
    const int64_t angle = a_.by_position ? position : token;
    turn(phase_.pointer<T>(0) + token * a_.q_stride, phase_.pointer<const T>(5), a_.q_heads, angle);
    T *key = phase_.pointer<T>(1) + token * a_.k_stride;
    turn(key, phase_.pointer<const T>(6), a_.kv_heads, angle);

    CacheShape shape{a_.kv_heads, a_.head_dim};
    T *unit = pages_of(phase_.pointer<T>(7), phase_.step->groups[a_.group], request, shape).keys(position / kUnit, 0);
    const T *value = phase_.pointer<const T>(2) + token * a_.v_stride;
    for (int64_t head = 0; head < a_.kv_heads; head++, unit += shape.head_elements()) {
      store_key(key + head * a_.head_dim, unit, slot, a_.head_dim);
      store_values(value + head * a_.head_dim, unit + shape.key_elements(), slot, shape, token, together);
    }
  }

  void store_values(const T *value, T *unit, int64_t slot, CacheShape shape, int64_t token, Range together) const {
    if constexpr (Multiply<T>::depth == 2) {
      if (slot % 2 == 0 && token + 1 < together.end) return store_pair(value, value + a_.v_stride, unit, slot, shape);
      if (slot % 2 == 1 && token > together.begin) return;  // stored with the one before
    }
    store_value(value, unit, slot, shape);
  }

  // Normalise and rotate heads.
  void turn(T *x, const T *weight, int64_t heads, int64_t angle) const {
    const T *cos = phase_.pointer<const T>(3) + angle * a_.cos_stride;
    const T *sin = phase_.pointer<const T>(4) + angle * a_.cos_stride;
    for (int64_t head = 0; weight && head < heads; head++)
      normalise(x + head * a_.head_dim, weight, a_.head_dim, a_.norm_flags, phase_.op->f[0]);
    if (!a_.rotary_dim) return;
    if (!a_.interleaved) return rotate_halves(x, heads, a_.head_dim, cos, sin, a_.rotary_dim);
    for (int64_t head = 0; head < heads; head++) rotate_pairs(x + head * a_.head_dim, cos, sin, a_.rotary_dim);
  }

  const Phase &phase_;
  Arguments a_;
};

void run(const Phase &phase, Task task, Thread &) {
  int64_t size = Arguments(*phase.op).tokens_per_task(), begin = task.index * size;
  int64_t end = std::min(begin + size, phase.step->num_tokens);
  with_type(phase.op->type, [&](auto type) {
    Tokens<decltype(type)>(phase).run({begin, end});
  });
}

}  // namespace

const Kernel kRopeStore = {check, split, run};

}  // namespace cl

int64_t cl_cache_elements(int, int64_t page_size, int64_t kv_heads, int64_t head_dim) {
  return cl::divide_up(page_size, cl::kUnit) * cl::CacheShape{kv_heads, head_dim}.unit_elements();
}
