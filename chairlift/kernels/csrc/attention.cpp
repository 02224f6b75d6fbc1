// CL_ATTEND: causal attention of new tokens over the pages of their requests.
//
// A tile is a few neighbouring tokens of one request and one key/value head: its rows, all query heads that share the
// key/value head, read each key and value together. Keys are taken in spans that start at multiples of kSpan from
// position 0 of the request. A span is finished by itself (scores, their largest, exponentials, weighted values) and
// then merged into what the spans before it gave, so the order of every sum depends on the query's position alone:
// neither on the other rows, nor on how a prompt was cut, nor on threads.
//
// A task is a tile, or one span of it where there are few tiles: then whoever finishes last merges them all, in order.
#include <algorithm>
#include <atomic>
#include <memory>
#include <type_traits>

#include "cache.h"

namespace cl {
namespace {

constexpr int64_t kSpan = 1024;  // keys
constexpr int64_t kSpanUnits = kSpan / kUnit;
constexpr float kLog2E = 1.44269504f;

// What follows decides about speed, and changes no bit.
constexpr int64_t kTileRows = 24;          // rows of a tile, where there are enough of them
constexpr int64_t kTasksPerThread = 8;     // less are too few to share evenly
constexpr int64_t kAhead = 4;              // units that are prefetched
constexpr int64_t kPieceBytes = 16 << 10;  // that an earlier phase prefetches at a time, at most

// Register tiles: rows x units of keys, rows x vectors of values.
#if defined(CL_AVX512)
constexpr int kRows = 6, kUnitsTogether = 4, kVectors = 4;
#else
constexpr int kRows = 4, kUnitsTogether = 1, kVectors = 1;
#endif

// Calls f with `rows`, which is at most R, as a constant.
template <int R = kRows, class F> CL_INLINE void with_rows(int64_t rows, F &&f) {
  if constexpr (R > 1) {
    if (rows < R) return with_rows<R - 1>(rows, f);
  }
  f(std::integral_constant<int, R>());
}

CL_INLINE int64_t round_up(int64_t n, int64_t multiple) { return divide_up(n, multiple) * multiple; }

struct Arguments {
  int64_t q_heads, kv_heads, head_dim, q_stride, out_stride, group, window;
  float scale, softcap;

  explicit Arguments(const ClOp &op)
      : q_heads(op.n[0]), kv_heads(op.n[1]), head_dim(op.n[2]), q_stride(op.n[3]), out_stride(op.n[4]), group(op.n[5]),
        window(op.n[6]), scale(op.f[0]), softcap(op.f[1]) {}

  int64_t sharing() const { return q_heads / kv_heads; }  // query heads to a key/value head
  CacheShape shape() const { return {kv_heads, head_dim}; }
  Range units(const ClRequest &r) const {  // of keys that its tokens see
    return {first_key(r.position) / kUnit, (r.position + r.count - 1) / kUnit + 1};
  }
  int64_t first_key(int64_t position) const { return window > 0 ? std::max<int64_t>(0, position - window + 1) : 0; }
};

Error check(const Phase &phase) {
  const ClOp &op = *phase.op;
  Arguments a(op);
  if (!op.p[0] || !op.p[1] || !op.p[2]) return kMissingPointer;
  if (a.kv_heads <= 0 || a.q_heads % a.kv_heads || a.head_dim <= 0 || a.head_dim % 2) return kBadSize;
  return phase.step->groups[a.group].page_size % kUnit || !(a.scale > 0.0f) ? kUnsupported : kOk;
}

// What attention over one span gave, or over several: for each row the largest score (times log2 e), the sum of
// exponentials relative to it, and the values weighted by them.
struct Part {
  int64_t rows, columns;
  float *values, *largest, *sum;  // [rows][columns], [rows], [rows]

  static int64_t size(int64_t rows, int64_t columns) { return rows * columns + 2 * round_up(rows, kLanes); }
  Part(int64_t rows, int64_t columns, float *memory)
      : rows(rows), columns(columns), values(memory), largest(memory + rows * columns),
        sum(largest + round_up(rows, kLanes)) {}
};

float power(float x) {
  alignas(64) float lanes[kLanes];
  store(lanes, exp2(all(x)));
  return lanes[0];
}

// Joins the next span to those before it: both are brought to the larger of their largest scores.
void merge(Part &into, const Part &next) {
  for (int64_t i = 0; i < into.rows; i++) {
    if (next.largest[i] == -INFINITY) continue;  // the row sees none of its keys
    float largest = std::max(into.largest[i], next.largest[i]);
    float before = power(into.largest[i] - largest), now = power(next.largest[i] - largest);
    bool is_first = into.largest[i] == -INFINITY;
    float *values = into.values + i * into.columns;
    const float *more = next.values + i * into.columns;
    for (int64_t c = 0; c < into.columns; c += kLanes)
      store(values + c, is_first ? load(more + c) : fma(load(more + c), all(now), load(values + c) * all(before)));
    into.sum[i] = is_first ? next.sum[i] : into.sum[i] * before + next.sum[i] * now;
    into.largest[i] = largest;
  }
}

// Where the tasks of a tile leave their parts. One for each thread that runs programs: of a program only one phase is
// under way at a time.
class Shared {
 public:
  // Room for `count` parts of `size` numbers. Called before any task runs.
  void reserve(int64_t count, int64_t size) {
    size_ = std::max(size_, size);
    if (count > count_) {
      arrived_.reset(new std::atomic<int64_t>[static_cast<size_t>(count)]());
      count_ = count;
    }
    memory_.resize(std::max(memory_.size(), static_cast<size_t>(count_ * size_)));
  }

  float *part(int64_t i) { return memory_.data() + i * size_; }

  // Counts the tasks that come to `place`. True for the last of `count`, which sees what the others wrote.
  bool is_last(int64_t place, int64_t count) {
    if (arrived_[place].fetch_add(1, std::memory_order_acq_rel) + 1 < count) return false;
    arrived_[place].store(0, std::memory_order_relaxed);
    return true;
  }

 private:
  std::vector<float> memory_;
  std::unique_ptr<std::atomic<int64_t>[]> arrived_;
  int64_t count_ = 0, size_ = 0;
};

// `count` tokens of a request from `offset` on, and which span of their keys: kAll, or one, whose tile has its parts in
// `place` and what follows.
constexpr int32_t kAll = -1;
struct Piece {
  int32_t request, offset, count, span, place;
};

// The notes of a phase: the address of what its tasks share, then its pieces. A task is a piece for one head.
struct Notes {
  explicit Notes(const Phase &phase) : notes_(phase.notes) {}

  static void begin(Phase &phase, Shared *shared) { append(phase, shared); }
  template <class N> static void append(Phase &phase, const N &note) {
    const size_t size = phase.notes.size();
    phase.notes.resize(size + sizeof note / sizeof(int32_t));
    memcpy(&phase.notes[size], &note, sizeof note);
  }

  Shared &shared() const { return *read<Shared *>(0); }
  Piece piece(int64_t i) const { return read<Piece>(sizeof(Shared *) + static_cast<size_t>(i) * sizeof(Piece)); }
  int64_t num_pieces() const { return static_cast<int64_t>((notes_.size() * 4 - sizeof(Shared *)) / sizeof(Piece)); }

 private:
  template <class N> N read(size_t byte) const {
    N note;
    memcpy(&note, reinterpret_cast<const char *>(notes_.data()) + byte, sizeof note);
    return note;
  }
  const std::vector<int32_t> &notes_;
};

int64_t count_tiles(const ClStep &step, int64_t size) {
  int64_t count = 0;
  for (int64_t r = 0; r < step.num_requests; r++) count += divide_up(step.requests[r].count, size);
  return count;
}

int64_t split(Phase &phase) {
  thread_local Shared shared;
  Arguments a(*phase.op);
  const ClStep &step = *phase.step;
  const int64_t enough = divide_up(kTasksPerThread * phase.threads, a.kv_heads);
  int64_t size = std::max<int64_t>(1, kTileRows / a.sharing());
  if (count_tiles(step, size) < enough) size = std::max<int64_t>(1, kRows / a.sharing());
  const bool by_span = phase.threads > 1 && count_tiles(step, size) < enough;

  Notes::begin(phase, &shared);
  int32_t place = 0;
  for (int64_t r = 0; r < step.num_requests; r++) {
    const ClRequest &request = step.requests[r];
    for (int64_t offset = 0; offset < request.count; offset += size) {
      int64_t count = std::min(size, request.count - offset), position = request.position + offset;
      Piece piece = {static_cast<int32_t>(r), static_cast<int32_t>(offset), static_cast<int32_t>(count), kAll, place};
      int64_t span = a.first_key(position) / kSpan, last = (position + count - 1) / kSpan;
      if (!by_span || span == last) {
        Notes::append(phase, piece);
        continue;
      }
      place += static_cast<int32_t>(last - span + 1);
      for (; span <= last; span++) {
        piece.span = static_cast<int32_t>(span);
        Notes::append(phase, piece);
      }
    }
  }
  if (place) shared.reserve(place * a.kv_heads, Part::size(size * a.sharing(), a.shape().columns()));
  return Notes(phase).num_pieces() * a.kv_heads;
}

// Scores of R rows against U units of keys, each a chain over the head's dimensions in order. On the way the keys of the
// units that come next and the values of these are brought near.
template <class T, int R, int U>
void multiply_keys(const typename Multiply<T>::Left *queries, const T *const *units, CacheShape shape, float *scores,
                   int64_t stride) {
  using M = Multiply<T>;
  const int64_t end = shape.key_elements(), dim = shape.head_dim;
  V sum[R][U];
#pragma GCC unroll 8
  for (int i = 0; i < R; i++)
#pragma GCC unroll 4
    for (int j = 0; j < U; j++) sum[i][j] = zero();
  for (int64_t at = 0; at < end; at += kUnit * M::depth, queries += M::depth) {
    typename M::Right columns[U];
#pragma GCC unroll 4
    for (int j = 0; j < U; j++) {
      columns[j] = M::load(units[j] + at);
      prefetch(units[j + kAhead] + at);
      prefetch(units[j] + end + at);
    }
#pragma GCC unroll 8
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
      for (int j = 0; j < U; j++) sum[i][j] = M::add(sum[i][j], queries + i * dim, columns[j]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; i++)
#pragma GCC unroll 4
    for (int j = 0; j < U; j++) store(scores + i * stride + j * kUnit, sum[i][j]);
}

// The values of a pair of tokens of which only the first exists: what stands in the other's slots is not looked at.
template <class T> typename Multiply<T>::Right first_of_pair(const T *values) {
  T alone[kLanes * Multiply<T>::depth] = {};
  for (int i = 0; i < kLanes; i++) alone[i * Multiply<T>::depth] = values[i * Multiply<T>::depth];
  return Multiply<T>::load(alone);
}

// sums = weights of R rows for `tokens` tokens times C vectors of their values, each a chain over the tokens in order.
// A unit's vectors begin `offset` behind its keys; rows of weights are `stride` apart, rows of sums and of values
// `columns`.
template <class T, int R, int C>
void multiply_values(const typename Multiply<T>::Left *weights, int64_t stride, const T *const *units, int64_t offset,
                     int64_t tokens, float *sums, int64_t columns) {
  using M = Multiply<T>;
  V sum[R][C];
#pragma GCC unroll 8
  for (int i = 0; i < R; i++)
#pragma GCC unroll 4
    for (int j = 0; j < C; j++) sum[i][j] = zero();
  for (; tokens > 0; tokens -= kUnit, weights += kUnit) {
    const T *values = *units++ + offset;
    const int64_t count = std::min(kUnit, tokens);
    int64_t t = 0;
    for (; t + M::depth <= count; t += M::depth, values += M::depth * columns) {
      typename M::Right right[C];
#pragma GCC unroll 4
      for (int j = 0; j < C; j++) right[j] = M::load(values + j * kLanes * M::depth);
#pragma GCC unroll 8
      for (int i = 0; i < R; i++)
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) sum[i][j] = M::add(sum[i][j], weights + i * stride + t, right[j]);
    }
    if (t == count) continue;
#pragma GCC unroll 4
    for (int j = 0; j < C; j++) {
      typename M::Right right = first_of_pair<T>(values + j * kLanes * M::depth);
#pragma GCC unroll 8
      for (int i = 0; i < R; i++) sum[i][j] = M::add_one(sum[i][j], weights + i * stride + t, right);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; i++)
#pragma GCC unroll 4
    for (int j = 0; j < C; j++) store(sums + i * columns + j * kLanes, sum[i][j]);
}

// What a task is about.
template <class T> struct Work {
  Piece piece;
  int64_t head;              // key/value head
  int64_t token, position;   // of the first of its tokens, in the step and in the request
  int64_t first, last;       // keys that any row sees
  int64_t begin, end;        // spans
  Pages<T> pages;

  Work(const Phase &phase, const Arguments &a, int64_t task)
      : piece(Notes(phase).piece(task / a.kv_heads)), head(task % a.kv_heads) {
    const ClRequest &request = phase.step->requests[piece.request];
    token = request.start + piece.offset;
    position = request.position + piece.offset;
    first = a.first_key(position);
    last = position + piece.count - 1;
    begin = first / kSpan;
    end = last / kSpan + 1;
    pages = pages_of(phase.pointer<T>(1), phase.step->groups[a.group], request, a.shape());
  }

  Range units(int64_t span) const {
    return {std::max(span * kSpanUnits, first / kUnit), std::min((span + 1) * kSpanUnits, last / kUnit + 1)};
  }
  int64_t start() const { return piece.span == kAll ? begin : piece.span; }
};

// One query row: where it writes, and which keys it sees, [first, last].
template <class T> struct Row {
  T *out;
  int64_t first, last, head;
};

// The rows of a task.
template <class T> class Tile {
  using M = Multiply<T>;
  using Left = typename M::Left;

 public:
  // `next`: the work to come, whose first keys are prefetched.
  Tile(const Phase &phase, const Arguments &a, const Work<T> &work, const Work<T> &next, Thread &thread)
      : a_(a), work_(work), next_(next), count_(work.piece.count * a.sharing()),
        rows_together_(divide_up(count_, divide_up(count_, kRows))), columns_(a.shape().columns()) {
    const int64_t longest = std::min(kSpanUnits, work.last / kUnit - work.first / kUnit + 1);
    stride_ = (longest | 1) * kUnit;  // odd: no power of two
    const int64_t rows = round_up(count_ * static_cast<int64_t>(sizeof(Row<T>)), 64) / 4;
    const int64_t parts = 2 * Part::size(count_, columns_);
    memory_ = thread.scratch<float>(static_cast<size_t>(rows + count_ * (stride_ + a.head_dim) + parts));
    scores_ = memory_ + rows;
    parts_ = scores_ + count_ * stride_;
    queries_ = reinterpret_cast<Left *>(parts_ + parts);
    rows_ = reinterpret_cast<Row<T> *>(memory_);
    for (int64_t i = 0; i < count_; i++) set_row(phase, i);
  }

  Part part_in(float *memory) const { return Part(count_, columns_, memory); }
  Part own_part(int64_t i) const { return part_in(parts_ + i * Part::size(count_, columns_)); }  // of two

  // Attention over one span.
  void attend(int64_t span, Part &part) {
    range_ = work_.units(span);
    list_units(span);
    score();
    for (int64_t i = 0; i < count_; i++) weigh(i, part);
    add_values(part);
  }

  void finish(const Part &part, const float *sinks) const {
    for (int64_t i = 0; i < count_; i++) {
      const Row<T> &row = rows_[i];
      float sum = part.sum[i], scale = 1.0f;
      if (sinks) {  // one more score in the softmax, with no value
        float sink = sinks[row.head] * kLog2E, largest = std::max(part.largest[i], sink);
        scale = power(part.largest[i] - largest);
        sum = sum * scale + power(sink - largest);
      }
      V factor = all(scale / sum);
      for (int64_t c = 0; c < a_.head_dim; c += kLanes)
        store(row.out + c, load(part.values + i * columns_ + c) * factor, a_.head_dim - c);
    }
  }

 private:
  void set_row(const Phase &phase, int64_t i) {
    const int64_t sharing = a_.sharing(), offset = i / sharing, head = work_.head * sharing + i % sharing;
    const int64_t token = work_.token + offset, position = work_.position + offset;
    T *out = phase.pointer<T>(2) + token * a_.out_stride + head * a_.head_dim;
    rows_[i] = {out, a_.first_key(position), position, head};
    set_query(phase.pointer<const T>(0) + token * a_.q_stride + head * a_.head_dim, i);
  }

  void set_query(const T *query, int64_t i) {
    for (int64_t d = 0; d < a_.head_dim; d += kLanes)
      store(queries_ + i * a_.head_dim + d, load(query + d, a_.head_dim - d), a_.head_dim - d);
  }

  // The units of a span, and those to prefetch meanwhile.
  void list_units(int64_t span) {
    const T **end = work_.pages.list(range_.begin, range_.end, work_.head, units_);
    const bool is_mine = work_.piece.span == kAll && span + 1 < work_.end;
    const Work<T> &then = is_mine ? work_ : next_;
    Range units = then.units(is_mine ? span + 1 : then.start());
    const T **ahead = then.pages.list(units.begin, std::min(units.begin + kAhead, units.end), then.head, end);
    while (ahead < end + kAhead) *ahead = ahead[-1], ahead++;
  }

  template <class F> void for_rows(F &&f) const {
    for (int64_t i = 0; i < count_; i += rows_together_)
      with_rows(std::min(rows_together_, count_ - i), [&](auto rows) { f(rows, i); });
  }

  void score() {
    int64_t unit = score_units<kUnitsTogether>(0);
    unit = score_units<std::max(1, kUnitsTogether / 2)>(unit);
    score_units<1>(unit);
  }

  // As many times U units as there are from `unit` on; returns the unit behind them.
  template <int U> int64_t score_units(int64_t unit) const {
    for (; unit + U <= range_.end - range_.begin; unit += U)
      for_rows([&](auto rows, int64_t i) {
        multiply_keys<T, rows.value, U>(queries_ + i * a_.head_dim, units_ + unit, a_.shape(),
                                        scores_ + i * stride_ + unit * kUnit, stride_);
      });
    return unit;
  }

  // Scores become weights, in their place.
  void weigh(int64_t i, Part &part) {
    const Row<T> &row = rows_[i];
    const int64_t all_units = range_.end - range_.begin;
    const int64_t begin = std::clamp<int64_t>(row.first / kUnit - range_.begin, 0, all_units);
    const int64_t end = std::clamp<int64_t>(row.last / kUnit + 1 - range_.begin, begin, all_units);
    float *scores = scores_ + i * stride_;
    Left *weights = weights_of(i);

    if (a_.softcap > 0.0f)
      for (int64_t k = begin * kUnit; k < end * kUnit; k += kUnit)
        store(scores + k, tanh(load(scores + k) * all(a_.scale / a_.softcap)) * all(a_.softcap));
    hide(row, begin, end, scores);
    V most = all(-INFINITY), sum = zero();
    for (int64_t k = begin * kUnit; k < end * kUnit; k += kUnit) most = max(load(scores + k), most);
    const float scale = (a_.softcap > 0.0f ? 1.0f : a_.scale) * kLog2E, largest = max_of(most) * scale;
    const V factor = all(scale), shift = all(largest == -INFINITY ? 0.0f : -largest);
    for (int64_t k = 0; k < begin * kUnit; k += kUnit) store(weights + k, zero());
    for (int64_t k = begin * kUnit; k < end * kUnit; k += kUnit) {
      V weight = exp2_for<T>(fma(load(scores + k), factor, shift));
      sum = sum + weight;
      store(weights + k, std::is_same<T, Left>::value ? weight : round_to<T>(weight));
    }
    for (int64_t k = end * kUnit; k < all_units * kUnit; k += kUnit) store(weights + k, zero());
    part.largest[i] = largest;
    part.sum[i] = sum_of(sum);
  }

  Left *weights_of(int64_t i) const { return reinterpret_cast<Left *>(scores_ + i * stride_); }

  // Keys that a row does not see, in the first and the last unit that it does.
  void hide(const Row<T> &row, int64_t begin, int64_t end, float *scores) const {
    if (begin == end) return;
    const V hidden = all(-INFINITY);
    const int64_t before = row.first - (range_.begin + begin) * kUnit, last = (end - 1) * kUnit;
    if (before > 0) store(scores + begin * kUnit, first(before, hidden, load(scores + begin * kUnit)));
    store(scores + last, first(row.last + 1 - range_.begin * kUnit - last, load(scores + last), hidden));
  }

  void add_values(Part &part) const {
    const int64_t tokens = std::min(range_.end * kUnit, work_.last + 1) - range_.begin * kUnit;
    for_rows([&](auto rows, int64_t i) {
      int64_t column = 0;
      column = add_columns<rows.value, 4>(i, column, tokens, part);
      column = add_columns<rows.value, 2>(i, column, tokens, part);
      add_columns<rows.value, 1>(i, column, tokens, part);
    });
  }

  // As many times C vectors as there are from `column` on; returns the column behind them.
  template <int R, int C> int64_t add_columns(int64_t i, int64_t column, int64_t tokens, Part &part) const {
    const int64_t values = a_.shape().key_elements();
    if constexpr (C <= kVectors)
      for (; column + C * kLanes <= columns_; column += C * kLanes)
        multiply_values<T, R, C>(weights_of(i), stride_of_weights(), units_, values + column * M::depth, tokens,
                                 part.values + i * columns_ + column, columns_);
    return column;
  }

  int64_t stride_of_weights() const { return stride_ * static_cast<int64_t>(sizeof(float) / sizeof(Left)); }

  const Arguments &a_;
  const Work<T> &work_, &next_;
  const int64_t count_, rows_together_, columns_;
  int64_t stride_;  // from row to row of scores
  Range range_{};   // units of the span under way
  float *memory_, *scores_, *parts_;
  Left *queries_;
  Row<T> *rows_;
  const T *units_[kSpanUnits + kAhead];
};

template <class T> void run_task(const Phase &phase, Task task, Thread &thread) {
  Arguments a(*phase.op);
  const Work<T> work(phase, a, task.index);
  const Work<T> next(phase, a, std::min(task.index + 1, task.end - 1));
  Tile<T> tile(phase, a, work, next, thread);
  const float *sinks = phase.pointer<const float>(3);

  if (work.piece.span == kAll) {
    Part result = tile.own_part(0), part = tile.own_part(1);
    tile.attend(work.begin, result);
    for (int64_t span = work.begin + 1; span < work.end; span++) {
      tile.attend(span, part);
      merge(result, part);
    }
    return tile.finish(result, sinks);
  }
  Shared &shared = Notes(phase).shared();
  auto part_of_span = [&](int64_t span) {
    return tile.part_in(shared.part((work.piece.place + span - work.begin) * a.kv_heads + work.head));
  };
  Part part = part_of_span(work.piece.span);
  tile.attend(work.piece.span, part);
  if (!shared.is_last(work.piece.place * a.kv_heads + work.head, work.end - work.begin)) return;
  Part result = part_of_span(work.begin);
  for (int64_t span = work.begin + 1; span < work.end; span++) merge(result, part_of_span(span));
  tile.finish(result, sinks);
}

void run(const Phase &phase, Task task, Thread &thread) {
  with_type(phase.op->type, [&](auto type) { run_task<decltype(type)>(phase, task, thread); });
}

// How many heads of a unit are a piece of what is read.
int64_t heads_together(CacheShape shape, int64_t number_size) {
  int64_t heads = std::clamp<int64_t>(kPieceBytes / (shape.head_elements() * number_size), 1, shape.heads);
  while (shape.heads % heads) heads--;
  return heads;
}

Pieces reads(const Phase &phase) {
  const CacheShape shape = Arguments(*phase.op).shape();
  return with_type(phase.op->type, [&](auto type) {
    const int64_t size = sizeof type;
    return Pieces{phase.pointer<const char>(1), heads_together(shape, size) * shape.head_elements() * size};
  });
}

void list(const Phase &phase, std::vector<int64_t> &places) {
  const Arguments a(*phase.op);
  with_type(phase.op->type, [&](auto type) {
    for (int64_t r = 0; r < phase.step->num_requests; r++) {
      const ClRequest &request = phase.step->requests[r];
      const auto pages = pages_of(phase.pointer<decltype(type)>(1), phase.step->groups[a.group], request, a.shape());
      const Range units = a.units(request);
      for (int64_t unit = units.begin; unit < units.end; unit++)
        for (int64_t head = 0; head < a.kv_heads; head += heads_together(a.shape(), sizeof type))
          places.push_back(reinterpret_cast<const char *>(pages.keys(unit, head)) - phase.pointer<const char>(1));
    }
  });
}

}  // namespace

const Kernel kAttend = {check, split, run, nullptr, nullptr, reads, list};

}  // namespace cl
