// CL_ATTEND: causal attention of new tokens over the pages of their requests.
//
// A task is a few neighbouring tokens of one request and one key/value head: its query rows, all query heads that share
// the key/value head, read each key and value once. Keys are taken in spans that start at multiples of kSpan from
// position 0 of the request. A span is finished by itself (scores, their largest, exponentials, weighted values) and
// then merged into what the spans before it gave, so the order of every sum depends on the query's position alone:
// neither on the other rows, nor on how a prompt was cut, nor on threads.
#include <float.h>

#include <algorithm>

#include "cache.h"

namespace cl {
namespace {

constexpr int64_t kSpan = 1024;  // keys
constexpr int64_t kSpanUnits = kSpan / kUnit;
constexpr float kLog2E = 1.44269504f;

// Register tiles: rows x units of keys, rows x vectors of values. They change no bit.
#if defined(CL_AVX512)
constexpr int kRows = 8;
constexpr int units_together(int rows) { return rows <= 4 ? 4 : 3; }
constexpr int kColumnVectors = 3;
#else
constexpr int kRows = 4;
constexpr int units_together(int) { return 1; }
constexpr int kColumnVectors = 1;
#endif

struct Arguments {
  int64_t q_heads, kv_heads, head_dim, q_stride, out_stride, group, window;
  float scale, softcap;

  explicit Arguments(const ClOp &op)
      : q_heads(op.n[0]), kv_heads(op.n[1]), head_dim(op.n[2]), q_stride(op.n[3]), out_stride(op.n[4]), group(op.n[5]),
        window(op.n[6]), scale(op.f[0]), softcap(op.f[1]) {}

  int64_t group_size() const { return q_heads / kv_heads; }
  int64_t tokens_per_task() const { return std::max<int64_t>(1, kRows / group_size()); }
  int64_t first_key(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0; }
};

Error check(const Phase &phase) {
  const ClOp &op = *phase.op;
  Arguments a(op);
  if (!op.p[0] || !op.p[1] || !op.p[2]) return kMissingPointer;
  if (a.kv_heads <= 0 || a.q_heads % a.kv_heads || a.head_dim <= 0 || a.head_dim % 2) return kBadSize;
  return phase.step->groups[a.group].page_size % kUnit ? kUnsupported : kOk;
}

// Notes: (request, offset of the first token) of each tile of tokens.
int64_t split(Phase &phase) {
  Arguments a(*phase.op);
  const int64_t size = a.tokens_per_task();
  for (int64_t r = 0; r < phase.step->num_requests; r++)
    for (int64_t offset = 0; offset < phase.step->requests[r].count; offset += size) {
      phase.notes.push_back(static_cast<int32_t>(r));
      phase.notes.push_back(static_cast<int32_t>(offset));
    }
  return static_cast<int64_t>(phase.notes.size() / 2) * a.kv_heads;
}

// One query row: where it reads and writes, and which keys it sees, [first, last].
template <class T> struct Row {
  const T *query;
  T *out;
  int64_t first, last, head;
};

// Scores of R rows against U units of keys, each a chain over the head's dimensions in order.
template <class T, int R, int U>
void multiply_keys(const typename Multiply<T>::Left *const *queries, const T *const *keys, int64_t dim, float *scores) {
  using M = Multiply<T>;
  V sum[R][U];
#pragma GCC unroll 8
  for (int i = 0; i < R; i++)
#pragma GCC unroll 4
    for (int j = 0; j < U; j++) sum[i][j] = zero();
  for (int64_t d = 0; d < dim; d += M::depth) {
    typename M::Right columns[U];
#pragma GCC unroll 4
    for (int j = 0; j < U; j++) columns[j] = M::load(keys[j] + d * kUnit);
#pragma GCC unroll 8
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
      for (int j = 0; j < U; j++) sum[i][j] = M::add(sum[i][j], queries[i] + d, columns[j]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; i++)
#pragma GCC unroll 4
    for (int j = 0; j < U; j++) store(scores + i * kSpan + j * kUnit, sum[i][j]);
}

// The values of a pair of tokens of which only the first exists: what stands in the other's slots is not looked at.
template <class T> typename Multiply<T>::Right first_of_pair(const T *values) {
  T alone[kLanes * Multiply<T>::depth] = {};
  for (int i = 0; i < kLanes; i++) alone[i * Multiply<T>::depth] = values[i * Multiply<T>::depth];
  return Multiply<T>::load(alone);
}

// sums += weights of `count` tokens times C vectors of their values.
template <class T, int R, int C>
void multiply_values(const typename Multiply<T>::Left *weights, const T *values, int64_t columns, int64_t count,
                     V (&sum)[R][C]) {
  using M = Multiply<T>;
  int64_t t = 0;
  for (; t + M::depth <= count; t += M::depth) {
    typename M::Right right[C];
#pragma GCC unroll 3
    for (int j = 0; j < C; j++) right[j] = M::load(values + t * columns + j * kLanes * M::depth);
#pragma GCC unroll 8
    for (int i = 0; i < R; i++)
#pragma GCC unroll 3
      for (int j = 0; j < C; j++) sum[i][j] = M::add(sum[i][j], weights + i * kSpan + t, right[j]);
  }
  if (t == count) return;
#pragma GCC unroll 3
  for (int j = 0; j < C; j++) {
    typename M::Right right = first_of_pair<T>(values + t * columns + j * kLanes * M::depth);
#pragma GCC unroll 8
    for (int i = 0; i < R; i++) sum[i][j] = M::add_one(sum[i][j], weights + i * kSpan + t, right);
  }
}

// Attention of up to kRows rows of one request over one key/value head.
template <class T, int R> class Tile {
  using M = Multiply<T>;
  using Left = typename M::Left;

 public:
  Tile(const Arguments &a, const Pages<T> &pages, int64_t head, const Row<T> *rows, Thread &thread)
      : a_(a), pages_(pages), head_(head), rows_(rows), columns_(pages.shape.columns()) {
    const int64_t dim = a.head_dim;
    float *memory = thread.scratch<float>(static_cast<size_t>(R * (2 * kSpan + 2 * columns_ + dim)));
    scores_ = memory;
    weights_ = reinterpret_cast<Left *>(scores_ + R * kSpan);
    part_ = scores_ + 2 * R * kSpan;
    out_ = part_ + R * columns_;
    widened_ = out_ + R * columns_;
    std::fill(out_, out_ + R * columns_, 0.0f);
    for (int i = 0; i < R; i++) {
      largest_[i] = -INFINITY;
      sum_[i] = 0.0f;
      queries_[i] = left(rows[i].query, i);
    }
  }

  void run(const float *sinks) {
    int64_t first = rows_[0].first, last = rows_[0].last;
    for (int i = 1; i < R; i++) {
      first = std::min(first, rows_[i].first);
      last = std::max(last, rows_[i].last);
    }
    last_ = last;
    for (int64_t span = first / kSpan; span <= last / kSpan; span++) {
      int64_t from = std::max(span * kSpanUnits, first / kUnit);
      int64_t to = std::min((span + 1) * kSpanUnits, last / kUnit + 1);
      score(from, to);
      weigh(from, to);
      add_values(from, to);
      merge();
    }
    for (int i = 0; i < R; i++) finish(i, sinks);
  }

 private:
  const Left *left(const T *query, int row) {
    if constexpr (std::is_same<T, Left>::value) {
      return query;
    } else {
      Left *copy = widened_ + row * a_.head_dim;
      for (int64_t d = 0; d < a_.head_dim; d += kLanes) store(copy + d, load(query + d, a_.head_dim - d), a_.head_dim - d);
      return copy;
    }
  }

  template <int U> void score_units(int64_t unit, float *scores) {
    const T *keys[U];
    for (int j = 0; j < U; j++) keys[j] = pages_.keys(unit + j, head_);
    multiply_keys<T, R, U>(queries_, keys, a_.head_dim, scores);
  }

  void score(int64_t from, int64_t to) {
    constexpr int together = units_together(R);
    int64_t unit = from;
    for (; unit + together <= to; unit += together) score_units<together>(unit, scores_ + (unit - from) * kUnit);
    for (; unit < to; unit++) score_units<1>(unit, scores_ + (unit - from) * kUnit);
  }

  V final_score(V product) const {
    V score = product * all(a_.scale);
    return a_.softcap > 0.0f ? all(a_.softcap) * tanh(score / all(a_.softcap)) : score;
  }

  // Scores of keys that a row does not see become -infinity; then weights are exponentials, and their sum.
  void weigh(int64_t from, int64_t to) {
    const V hidden = all(-INFINITY);
    for (int i = 0; i < R; i++) {
      float *scores = scores_ + i * kSpan;
      V largest = hidden;
      for (int64_t unit = from; unit < to; unit++) {
        int64_t key = unit * kUnit;
        float *at = scores + (unit - from) * kUnit;
        V score = final_score(load(at));
        if (key < rows_[i].first) score = first(rows_[i].first - key, hidden, score);
        if (key + kUnit > rows_[i].last + 1) score = first(rows_[i].last + 1 - key, score, hidden);
        store(at, score);
        largest = max(score, largest);
      }
      part_largest_[i] = max_of(largest);
      V shift = all(part_largest_[i] == -INFINITY ? 0.0f : part_largest_[i]), sum = zero();
      for (int64_t unit = from; unit < to; unit++) {
        V weight = exp2((load(scores + (unit - from) * kUnit) - shift) * all(kLog2E));
        sum = sum + weight;
        store(weights_ + i * kSpan + (unit - from) * kUnit, round_to<T>(weight));
      }
      part_sum_[i] = sum_of(sum);
    }
  }

  template <int C> void add_columns(int64_t from, int64_t to, int64_t column) {
    V sum[R][C];
    for (int i = 0; i < R; i++)
      for (int j = 0; j < C; j++) sum[i][j] = zero();
    for (int64_t unit = from; unit < to; unit++) {
      const T *values = pages_.values_behind(pages_.keys(unit, head_)) + column * M::depth;
      int64_t count = std::min(kUnit, last_ + 1 - unit * kUnit);
      multiply_values<T, R, C>(weights_ + (unit - from) * kUnit, values, columns_, count, sum);
    }
    for (int i = 0; i < R; i++)
      for (int j = 0; j < C; j++) store(part_ + i * columns_ + column + j * kLanes, sum[i][j]);
  }

  void add_values(int64_t from, int64_t to) {
    int64_t column = 0;
    for (; column + kColumnVectors * kLanes <= columns_; column += kColumnVectors * kLanes)
      add_columns<kColumnVectors>(from, to, column);
    for (; column < columns_; column += kLanes) add_columns<1>(from, to, column);
  }

  // Joins a finished span: both sides are brought to the larger of their largest scores.
  void merge() {
    for (int i = 0; i < R; i++) {
      if (part_largest_[i] == -INFINITY) continue;
      float largest = std::max(largest_[i], part_largest_[i]);
      float before = power(largest_[i] - largest), now = power(part_largest_[i] - largest);
      float *out = out_ + i * columns_;
      const float *part = part_ + i * columns_;
      for (int64_t c = 0; c < columns_; c += kLanes)
        store(out + c, fma(load(part + c), all(now), load(out + c) * all(before)));
      sum_[i] = sum_[i] * before + part_sum_[i] * now;
      largest_[i] = largest;
    }
  }

  static float power(float x) {
    alignas(64) float lanes[kLanes];
    store(lanes, exp2(all(x) * all(kLog2E)));
    return lanes[0];
  }

  void finish(int row, const float *sinks) {
    const Row<T> &r = rows_[row];
    float sum = sum_[row], scale = 1.0f;
    if (sinks) {  // one more score in the softmax, with no value
      float largest = std::max(largest_[row], sinks[r.head]);
      scale = power(largest_[row] - largest);
      sum = sum * scale + power(sinks[r.head] - largest);
    }
    V factor = all(scale / sum);
    for (int64_t c = 0; c < a_.head_dim; c += kLanes)
      store(r.out + c, load(out_ + row * columns_ + c) * factor, a_.head_dim - c);
  }

  const Arguments &a_;
  const Pages<T> &pages_;
  const int64_t head_;
  const Row<T> *rows_;
  const int64_t columns_;
  int64_t last_ = 0;  // key that any row sees
  const Left *queries_[R];
  float *scores_, *part_, *out_;  // [R][kSpan], [R][columns], [R][columns]
  Left *weights_;                 // [R][kSpan]
  float *widened_;                // [R][head_dim], queries where the machine multiplies floats
  float largest_[R], sum_[R], part_largest_[R], part_sum_[R];
};

template <class T>
void run_rows(int count, const Arguments &a, const Pages<T> &pages, int64_t head, const Row<T> *rows, Thread &thread,
              const float *sinks) {
  switch (count) {
    case 1: return Tile<T, 1>(a, pages, head, rows, thread).run(sinks);
    case 2: return Tile<T, 2>(a, pages, head, rows, thread).run(sinks);
    case 3: return Tile<T, 3>(a, pages, head, rows, thread).run(sinks);
    case 4: return Tile<T, 4>(a, pages, head, rows, thread).run(sinks);
    case 5: return Tile<T, std::min(5, kRows)>(a, pages, head, rows, thread).run(sinks);
    case 6: return Tile<T, std::min(6, kRows)>(a, pages, head, rows, thread).run(sinks);
    case 7: return Tile<T, std::min(7, kRows)>(a, pages, head, rows, thread).run(sinks);
    default: return Tile<T, kRows>(a, pages, head, rows, thread).run(sinks);
  }
}

template <class T> void run_task(const Phase &phase, Task task, Thread &thread) {
  Arguments a(*phase.op);
  int64_t head = task.index % a.kv_heads, tile = task.index / a.kv_heads, group = a.group_size();
  const ClRequest &request = phase.step->requests[phase.notes[2 * tile]];
  int64_t offset = phase.notes[2 * tile + 1];
  int64_t tokens = std::min<int64_t>(a.tokens_per_task(), request.count - offset);
  Pages<T> pages = pages_of(phase.pointer<T>(1), phase.step->groups[a.group], request, CacheShape{a.kv_heads, a.head_dim});

  Row<T> rows[kRows];
  int count = 0;
  for (int64_t i = 0; i < tokens * group; i++) {
    int64_t token = request.start + offset + i / group, query_head = head * group + i % group;
    int64_t position = request.position + offset + i / group;
    rows[count++] = {phase.pointer<const T>(0) + token * a.q_stride + query_head * a.head_dim,
                     phase.pointer<T>(2) + token * a.out_stride + query_head * a.head_dim, a.first_key(position), position,
                     query_head};
    if (count == kRows || i + 1 == tokens * group) {
      run_rows<T>(count, a, pages, head, rows, thread, phase.pointer<const float>(3));
      count = 0;
    }
  }
}

void run(const Phase &phase, Task task, Thread &thread) {
  with_type(phase.op->type, [&](auto type) { run_task<decltype(type)>(phase, task, thread); });
}

}  // namespace

const Kernel kAttend = {check, split, run};

}  // namespace cl
