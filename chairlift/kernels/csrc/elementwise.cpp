// What is computed row by row and element by element: CL_EMBED, CL_GATHER, CL_ADD, CL_SCALE, CL_NORM, CL_ADD_NORM,
// CL_ACT, CL_SOFTCAP, CL_ARGMAX, CL_LARGEST.
// Arithmetic is in float32 and rounded where PyTorch's modules round.
#include <algorithm>
#include <functional>
#include <limits>
#include <type_traits>

#include "activation.h"
#include "runtime.h"

namespace cl {
namespace {

constexpr int64_t kTaskElements = 4096;  // some microseconds of work, and a multiple of kLanes

// The rows and columns of a task. `n[0]` is the width of all operations here.
struct Block {
  Range rows, columns;
};

// Tasks of whole rows, several together where rows are short.
int64_t rows_per_task(const Phase &phase) { return std::max<int64_t>(1, kTaskElements / phase.op->n[0]); }

int64_t split_rows(Phase &phase) { return divide_up(phase.rows(), rows_per_task(phase)); }

Range rows_of(const Phase &phase, Task task) {
  int64_t rows = rows_per_task(phase), begin = task.index * rows;
  return {begin, std::min(begin + rows, phase.rows())};
}

// The same, but long rows are cut.
int64_t columns_cut(const Phase &phase) { return divide_up(phase.op->n[0], kTaskElements); }

int64_t split_blocks(Phase &phase) { return split_rows(phase) * columns_cut(phase); }

Block block_of(const Phase &phase, Task task) {
  int64_t cut = columns_cut(phase), column = task.index % cut * kTaskElements;
  Range rows = rows_of(phase, Task{task.index / cut, task.end});
  return {rows, {column, std::min(column + kTaskElements, phase.op->n[0])}};
}

// Calls `f(row, column, lanes)` for each vector of a task, `lanes` of whose elements exist.
template <class F> CL_INLINE void for_block(const Phase &phase, Task task, F &&f) {
  Block block = block_of(phase, task);
  for (int64_t row = block.rows.begin; row < block.rows.end; row++)
    each_vector(block.columns.end - block.columns.begin, [&](int64_t column, int64_t lanes) CL_INLINE_LAMBDA {
      f(row, block.columns.begin + column, lanes);
    });
}

// A kernel from a function template over the number type, `Run<T>::run`.
template <template <class> class Run> void run_typed(const Phase &phase, Task task, Thread &) {
  with_type(phase.op->type, [&](auto type) { Run<decltype(type)>::run(phase, task); });
}

template <int count> Error check_pointers(const Phase &phase) {
  if (phase.op->n[0] <= 0) return kBadSize;
  for (int i = 0; i < count; i++)
    if (!phase.op->p[i]) return kMissingPointer;
  return kOk;
}

template <class T> struct Embed {
  static void run(const Phase &phase, Task task) {
    const ClOp &op = *phase.op;
    const T *table = phase.pointer<const T>(0);
    T *out = phase.pointer<T>(1);
    V scale = all(op.f[0]);
    for_block(phase, task, [&](int64_t row, int64_t column, int64_t lanes) {
      const T *from = table + phase.step->token_ids[row] * op.n[0];
      store(out + row * op.n[1] + column, load(from + column, lanes) * scale, lanes);
    });
  }
};

template <class T> struct Gather {
  static void run(const Phase &phase, Task task) {
    const ClOp &op = *phase.op;
    Block block = block_of(phase, task);
    size_t bytes = static_cast<size_t>(block.columns.end - block.columns.begin) * sizeof(T);
    for (int64_t row = block.rows.begin; row < block.rows.end; row++)
      memcpy(phase.pointer<T>(1) + row * op.n[2] + block.columns.begin,
             phase.pointer<const T>(0) + phase.step->keep[row] * op.n[1] + block.columns.begin, bytes);
  }
};

template <class T> struct Add {
  static void run(const Phase &phase, Task task) {
    const ClOp &op = *phase.op;
    const T *x = phase.pointer<const T>(0), *y = phase.pointer<const T>(1);
    T *out = phase.pointer<T>(2);
    for_block(phase, task, [&](int64_t row, int64_t column, int64_t lanes) {
      V sum = load(x + row * op.n[1] + column, lanes) + load(y + row * op.n[2] + column, lanes);
      store(out + row * op.n[3] + column, sum, lanes);
    });
  }
};

// out = f(x), element by element: p: x, out; n: width, x_stride, out_stride.
template <class T, class F> CL_INLINE void map(const Phase &phase, Task task, F &&f) {
  const ClOp &op = *phase.op;
  const T *x = phase.pointer<const T>(0);
  T *out = phase.pointer<T>(1);
  for_block(phase, task, [&](int64_t row, int64_t column, int64_t lanes) {
    store(out + row * op.n[2] + column, f(load(x + row * op.n[1] + column, lanes)), lanes);
  });
}

template <class T> struct Scale {
  static void run(const Phase &phase, Task task) {
    V scale = all(phase.op->f[0]);
    map<T>(phase, task, [&](V x) { return x * scale; });
  }
};

template <class T> struct Act {
  static void run(const Phase &phase, Task task) {
    int64_t act = phase.op->n[3];
    map<T>(phase, task, [&](V x) { return activate<T>(act, x); });
  }
};

template <class T> struct Softcap {
  static void run(const Phase &phase, Task task) {
    V cap = all(phase.op->f[0]);
    map<T>(phase, task, [&](V x) { return cap * tanh(x / cap); });
  }
};

// The first stretch of a row that holds its largest number is found by maxima alone, and then the number's place in it.
template <class T> struct Argmax {
  static void run(const Phase &phase, Task task) {
    Range rows = rows_of(phase, task);
    for (int64_t row = rows.begin; row < rows.end; row++)
      phase.pointer<int64_t>(1)[row] = best_of(phase.pointer<const T>(0) + row * phase.op->n[1], phase.op->n[0],
                                               &phase.pointer<float>(2)[row]);
  }

  static int64_t best_of(const T *x, int64_t width, float *largest) {
    float best = -INFINITY;
    int64_t begin = 0;
    V nan = zero();
    for (int64_t at = 0; at < width; at += kStretch) {
      const float most = most_of(x + at, std::min(kStretch, width - at), nan);
      if (most > best) best = most, begin = at;
    }
    *largest = best + sum_of(nan);
    return begin + place_of(best, x + begin, std::min(kStretch, width - begin));
  }

  static CL_INLINE float most_of(const T *x, int64_t width, V &nan) {
    V most[kChains] = {all(-INFINITY), all(-INFINITY), all(-INFINITY), all(-INFINITY)};
    int64_t i = 0;
    for (; i + kChains * kLanes <= width; i += kChains * kLanes)
#pragma GCC unroll 4
      for (int chain = 0; chain < kChains; chain++) {
        const V v = load(x + i + chain * kLanes);
        nan = nan_or(v, nan);
        most[chain] = max(v, most[chain]);
      }
    for (; i < width; i += kLanes) {
      const V v = first(width - i, load(x + i, width - i), all(-INFINITY));
      nan = nan_or(v, nan);
      most[0] = max(v, most[0]);
    }
    return max_of(max(max(most[0], most[1]), max(most[2], most[3])));
  }

  static int64_t place_of(float number, const T *x, int64_t width) {
    for (int64_t i = 0; i < width; i += kLanes)
      if (const uint32_t bits = at_least(first(width - i, load(x + i, width - i), all(NAN)), all(number)))
        return i + __builtin_ctz(bits);
    return 0;  // a row of nothing but NaN
  }

  static constexpr int64_t kStretch = 512;
  static constexpr int kChains = 4;  // maxima under way
};

// The largest numbers of a row. Its vectors are dealt out to groups, lane by lane; `count` lanes hold a number at least as
// large as the `count`-th largest of the lanes' maxima: what is smaller cannot be among the largest.
constexpr int64_t kMostLanes = 1024;

template <class T> class Largest {
 public:
  static void run(const Phase &phase, Task task, Thread &thread) {
    const ClOp &op = *phase.op;
    const int64_t width = op.n[0], count = op.n[2];
    Largest largest{count, width, thread.scratch<Entry>(static_cast<size_t>(width + kMostLanes))};
    Range rows = rows_of(phase, task);
    for (int64_t row = rows.begin; row < rows.end; row++)
      largest.take(phase.pointer<const T>(0) + row * op.n[1], phase.pointer<float>(1) + row * count,
                   phase.pointer<int64_t>(2) + row * count);
  }

 private:
  struct Entry {
    float value;
    int32_t column;
    bool operator<(const Entry &other) const {  // which comes first
      return value > other.value || (value == other.value && column < other.column);
    }
  };

  Largest(int64_t count, int64_t width, Entry *memory)
      : count_(count), width_(width), most_(reinterpret_cast<float *>(memory)), ordered_(most_ + kMostLanes),
        entries_(memory + kMostLanes) {
    while (lanes_ < std::min(4 * count, kMostLanes)) lanes_ *= 2;
  }

  void take(const T *x, float *values, int64_t *columns) {
    const float nan = find_most(x);
    const V bound = all(std::max(bound_of(), std::numeric_limits<float>::lowest()));  // above -infinity
    int64_t found = 0;
    each_vector(width_, [&](int64_t i, int64_t n) CL_INLINE_LAMBDA {
      const V v = first(n, load(x + i, n), all(-INFINITY));
      uint32_t bits = at_least(v, bound);
      if (!bits) return;
      alignas(64) float lanes[kLanes];
      store(lanes, v);
      for (; bits; bits &= bits - 1) {
        const int lane = __builtin_ctz(bits);
        entries_[found++] = {lanes[lane], static_cast<int32_t>(i + lane)};
      }
    });
    for (int64_t i = 0; found < count_; i++)  // a row with few numbers above -infinity, none of which is missing
      if (!(value_of(x, i) > -INFINITY)) entries_[found++] = {-INFINITY, static_cast<int32_t>(i)};
    std::partial_sort(entries_, entries_ + count_, entries_ + found);
    for (int64_t i = 0; i < count_; i++) {
      values[i] = entries_[i].value;
      columns[i] = entries_[i].column;
    }
    values[0] += nan;
  }

  // The largest number of each lane. Returns NaN if there is one in the row, else 0.
  float find_most(const T *x) {
    for (int64_t i = 0; i < lanes_; i += kLanes) store(most_ + i, all(-INFINITY));
    V nan = zero();
    each_vector(width_, [&](int64_t i, int64_t n) CL_INLINE_LAMBDA {
      const V v = first(n, load(x + i, n), all(-INFINITY));
      float *most = most_ + (i & (lanes_ - 1));
      store(most, max(v, load(most)));
      nan = nan_or(v, nan);
    });
    return sum_of(nan);
  }

  float bound_of() {
    std::copy(most_, most_ + lanes_, ordered_);
    std::nth_element(ordered_, ordered_ + count_ - 1, ordered_ + lanes_, std::greater<float>());
    return ordered_[count_ - 1];
  }

  static float value_of(const T *x, int64_t i) {
    if constexpr (std::is_same<T, float>::value) return x[i];
    alignas(64) float lanes[kLanes];
    store(lanes, load(x + i, 1));
    return lanes[0];
  }

  int64_t count_, width_;
  int64_t lanes_ = 4 * kLanes;  // a power of two, several times `count` where that is possible
  float *most_, *ordered_;
  Entry *entries_;
};

void largest(const Phase &phase, Task task, Thread &thread) {
  with_type(phase.op->type, [&](auto type) { Largest<decltype(type)>::run(phase, task, thread); });
}

Error check_largest(const Phase &phase) {
  if (Error error = check_pointers<3>(phase)) return error;
  const int64_t width = phase.op->n[0], count = phase.op->n[2];
  return count > 0 && count <= std::min(width, kMostLanes) && width <= 1 << 24 ? kOk : kBadSize;
}

Error check_argmax(const Phase &phase) {
  if (Error error = check_pointers<3>(phase)) return error;
  return phase.op->n[0] <= 1 << 24 ? kOk : kBadSize;
}

Error check_act(const Phase &phase) {
  if (Error error = check_pointers<2>(phase)) return error;
  return is_activation(phase.op->n[3]) ? kOk : kUnsupported;
}

// Norms ------------------------------------------------------------------------------------------------------------

// The sum of `term(column, lanes)` over a row, in an order that depends on the width alone.
template <class F> CL_INLINE float sum_over(int64_t width, F &&term) {
  constexpr int chains = 4;  // as many additions in flight
  V sum[chains] = {zero(), zero(), zero(), zero()};
  int64_t column = 0;
  for (; column + chains * kLanes <= width; column += chains * kLanes)
#pragma GCC unroll 4
    for (int i = 0; i < chains; i++) sum[i] = sum[i] + term(column + i * kLanes, int64_t{kLanes});
  for (; column < width; column += kLanes) sum[0] = sum[0] + term(column, width - column);
  return sum_of((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

template <class T> struct Norm {
  const T *weight, *bias;
  int64_t width, flags;
  float eps;

  void run(const T *x, T *out) const {
    const float count = static_cast<float>(width);
    float mean = 0.0f;
    if (flags & CL_LAYER_NORM)
      mean = sum_over(width, [&](int64_t i, int64_t n) CL_INLINE_LAMBDA { return load(x + i, n); }) / count;
    V center = all(mean);
    float squares = sum_over(width, [&](int64_t i, int64_t n) CL_INLINE_LAMBDA {
      V d = first(n, load(x + i, n) - center, zero());
      return d * d;
    });
    V scale = all(1.0f / sqrtf(squares / count + eps));
    each_vector(width, [&](int64_t i, int64_t n) CL_INLINE_LAMBDA {
      V v = (load(x + i, n) - center) * scale;
      store(out + i, weighted(v, i, n), n);
    });
  }

  CL_INLINE V weighted(V v, int64_t i, int64_t n) const {
    if (flags & CL_ROUND_FIRST) v = round_to<T>(v);
    if (weight) {
      V w = load(weight + i, n);
      v = v * (flags & CL_PLUS_ONE ? w + all(1.0f) : w);
    }
    return bias ? v + load(bias + i, n) : v;
  }
};

template <class T> struct RunNorm {
  static void run(const Phase &phase, Task task) {
    const ClOp &op = *phase.op;
    Norm<T> norm{phase.pointer<const T>(1), phase.pointer<const T>(2), op.n[0], op.n[3], op.f[0]};
    Range rows = rows_of(phase, task);
    for (int64_t row = rows.begin; row < rows.end; row++)
      norm.run(phase.pointer<const T>(0) + row * op.n[1], phase.pointer<T>(3) + row * op.n[2]);
  }
};

template <class T> struct RunAddNorm {
  static void run(const Phase &phase, Task task) {
    const ClOp &op = *phase.op;
    Norm<T> norm{phase.pointer<const T>(3), phase.pointer<const T>(4), op.n[0], op.n[5], op.f[0]};
    Range rows = rows_of(phase, task);
    for (int64_t row = rows.begin; row < rows.end; row++) {
      const T *x = phase.pointer<const T>(0) + row * op.n[1], *y = phase.pointer<const T>(1) + row * op.n[2];
      T *sum = phase.pointer<T>(2) + row * op.n[3];
      each_vector(op.n[0], [&](int64_t i, int64_t n) CL_INLINE_LAMBDA {
        store(sum + i, load(x + i, n) + load(y + i, n), n);
      });
      norm.run(sum, phase.pointer<T>(5) + row * op.n[4]);
    }
  }
};

Error check_norm(const Phase &phase) {
  const ClOp &op = *phase.op;
  if (!op.p[0] || !op.p[3]) return kMissingPointer;
  return op.n[0] > 0 ? kOk : kBadSize;
}

Error check_add_norm(const Phase &phase) {
  const ClOp &op = *phase.op;
  if (!op.p[0] || !op.p[1] || !op.p[2] || !op.p[5]) return kMissingPointer;
  return op.n[0] > 0 ? kOk : kBadSize;
}

}  // namespace

const Kernel kEmbed = {check_pointers<2>, split_blocks, run_typed<Embed>};
const Kernel kGather = {check_pointers<2>, split_blocks, run_typed<Gather>};
const Kernel kAdd = {check_pointers<3>, split_blocks, run_typed<Add>};
const Kernel kScale = {check_pointers<2>, split_blocks, run_typed<Scale>};
const Kernel kNorm = {check_norm, split_rows, run_typed<RunNorm>};
const Kernel kAddNorm = {check_add_norm, split_rows, run_typed<RunAddNorm>};
const Kernel kAct = {check_act, split_blocks, run_typed<Act>};
const Kernel kSoftcap = {check_pointers<2>, split_blocks, run_typed<Softcap>};
const Kernel kLargest = {check_largest, split_rows, largest};
const Kernel kArgmax = {check_argmax, split_rows, run_typed<Argmax>};

}  // namespace cl
