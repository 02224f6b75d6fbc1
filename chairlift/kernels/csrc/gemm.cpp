// Matrix products with packed weights: CL_LINEAR and CL_GATED.
//
// A weight W [N, K] is packed as panels of 48 of its rows, which are 48 columns of the result: [panels][K / depth][48]
// [depth], zeros beyond N and K, `depth` numbers of one row side by side as `Multiply` wants them. A panel is what a
// task reads from memory, once, in order.
//
// An element of the result is one chain of products over all of K, in order of K, whatever the tile: no sum is split,
// so a row's bits depend on neither its company nor the threads.
#include <algorithm>
#include <type_traits>

#include "activation.h"
#include "runtime.h"

namespace cl {
namespace {

constexpr int kPanelVectors = 3;
constexpr int kPanel = kPanelVectors * kLanes;

// A tile of the result that stays in registers: up to kTileRows rows of tile_vectors(rows) vectors. Its shape changes
// no bit. A single row needs more than one vector, or it waits for its own sums.
#if defined(CL_AVX512)
constexpr int kTileRows = 8;
constexpr int tile_vectors(int) { return kPanelVectors; }
#elif defined(CL_AVX2)
constexpr int kTileRows = 5;
constexpr int tile_vectors(int rows) { return rows == 1 ? kPanelVectors : 1; }
#elif defined(__aarch64__)
constexpr int kTileRows = 4;
constexpr int tile_vectors(int rows) { return rows == 1 ? kPanelVectors : 1; }
#else
constexpr int kTileRows = 2;
constexpr int tile_vectors(int) { return 1; }
#endif

constexpr int64_t kTileSums = kTileRows * kPanel;
constexpr int64_t kBlockRows = 128;     // rows of a task at most: they stay in the cache
constexpr int64_t kMinBlockRows = 32;   // and at least, where a product is cut to occupy all threads
constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kOwnRows = 128;       // with so many rows for each thread, each keeps to its own
constexpr int64_t kLine = 64;           // bytes that a prefetch brings
constexpr int64_t kAhead = 8192;        // bytes between what is multiplied and what is prefetched

// What to prefetch on the way, some bytes with each of so many steps of a product: two lines at most.
struct Stream {
  const char *at = nullptr;
  int64_t step = 0;

  Stream() = default;
  Stream(Span span, int64_t steps)
      : at(span.begin), step(span.bytes > 0 ? std::min(span.bytes / steps + 1, 2 * kLine) : 0) {}
};

// What is prefetched: the panel being read, `kAhead` bytes ahead (panels are neighbours, so this runs on into the next
// one), or the next panel and what a phase to come reads.
struct Ahead {
  Stream next, soon;

  int lines() const { return static_cast<int>(divide_up(std::max(next.step, soon.step), kLine)); }  // 0: this panel
};

template <class T> struct Tile {
  const typename Multiply<T>::Left *left;
  int64_t stride;
  const T *panel;
  int64_t K;
  float *sums;  // [rows][kPanel]
};

template <class T> CL_INLINE int64_t panel_size(int64_t K) {
  return divide_up(K, Multiply<T>::depth) * Multiply<T>::depth * kPanel;
}

template <class T, int R, int lines>
CL_INLINE void multiply_columns(const Tile<T> &tile, int first_vector, Ahead &ahead) {
  using M = Multiply<T>;
  constexpr int depth = M::depth, width = kLanes * depth, vectors = tile_vectors(R);
  const T *right = tile.panel + first_vector * width;
  const typename M::Left *left = tile.left;
  const char *next = ahead.next.at, *soon = ahead.soon.at;
  const int64_t next_step = ahead.next.step, soon_step = ahead.soon.step;
  V sum[R][vectors];
#pragma GCC unroll 8
  for (int i = 0; i < R; i++)
#pragma GCC unroll 3
    for (int j = 0; j < vectors; j++) sum[i][j] = zero();

  int64_t k = 0;
#pragma GCC unroll 2
  for (; k + depth <= tile.K; k += depth) {
    typename M::Right columns[vectors];
#pragma GCC unroll 3
    for (int j = 0; j < vectors; j++) {
      columns[j] = M::load(right + j * width);
      if (lines == 0) prefetch_once(reinterpret_cast<const char *>(right + j * width) + kAhead);
    }
#pragma GCC unroll 2
    for (int line = 0; line < lines; line++) {
      prefetch(next + line * kLine);
      prefetch(soon + line * kLine);
    }
    next += next_step;
    soon += soon_step;
#pragma GCC unroll 8
    for (int i = 0; i < R; i++)
#pragma GCC unroll 3
      for (int j = 0; j < vectors; j++) sum[i][j] = M::add(sum[i][j], left + i * tile.stride + k, columns[j]);
    right += kPanel * depth;
  }
  if (depth > 1 && k < tile.K) {
#pragma GCC unroll 3
    for (int j = 0; j < vectors; j++) {
      typename M::Right last = M::load(right + j * width);
#pragma GCC unroll 8
      for (int i = 0; i < R; i++) sum[i][j] = M::add_one(sum[i][j], left + i * tile.stride + k, last);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; i++)
#pragma GCC unroll 3
    for (int j = 0; j < vectors; j++) store(tile.sums + i * kPanel + (first_vector + j) * kLanes, sum[i][j]);
  ahead.next.at = next;
  ahead.soon.at = soon;
}

template <class T, int R> void multiply_tile(const Tile<T> &tile, Ahead &ahead) {
  const int lines = ahead.lines();
  for (int j = 0; j < kPanelVectors; j += tile_vectors(R)) {
    if (lines == 0)
      multiply_columns<T, R, 0>(tile, j, ahead);
    else if (lines == 1)
      multiply_columns<T, R, 1>(tile, j, ahead);
    else
      multiply_columns<T, R, 2>(tile, j, ahead);
  }
}

template <class T> void multiply_tile(int rows, const Tile<T> &tile, Ahead &ahead) {
  static_assert(kTileRows <= 8, "one case for each height");
  switch (rows) {
    case 1: return multiply_tile<T, 1>(tile, ahead);
    case 2: return multiply_tile<T, std::min(2, kTileRows)>(tile, ahead);
    case 3: return multiply_tile<T, std::min(3, kTileRows)>(tile, ahead);
    case 4: return multiply_tile<T, std::min(4, kTileRows)>(tile, ahead);
    case 5: return multiply_tile<T, std::min(5, kTileRows)>(tile, ahead);
    case 6: return multiply_tile<T, std::min(6, kTileRows)>(tile, ahead);
    case 7: return multiply_tile<T, std::min(7, kTileRows)>(tile, ahead);
    default: return multiply_tile<T, kTileRows>(tile, ahead);
  }
}

// The rows of x that a tile multiplies, as `Multiply<T>` wants its left operand: in place, or widened to `buffer`.
template <class T>
const typename Multiply<T>::Left *left_rows(const T *x, int64_t stride, int rows, int64_t K,
                                            typename Multiply<T>::Left *buffer, int64_t *left_stride) {
  if constexpr (std::is_same<T, typename Multiply<T>::Left>::value) {
    return x;
  } else {
    for (int i = 0; i < rows; i++)
      for (int64_t k = 0; k < K; k += kLanes) store(buffer + i * K + k, load(x + i * stride + k, K - k), K - k);
    *left_stride = K;
    return buffer;
  }
}

// What tasks of one operation share, and the numbers of theirs: panel by panel, all row blocks of a panel in turn. With
// many rows each thread first does all panels for rows of its own, so that it finds in its cache what it wrote there in
// the phase before.
struct Grid {
  int64_t panels, blocks, parts;  // blocks: of all parts together

  int64_t together() const { return blocks / parts; }  // row blocks that take turns at a panel
  int64_t panel(int64_t task) const { return task / together() % panels; }
  int64_t block(int64_t task) const { return task / (panels * together()) * together() + task % together(); }
};

Grid grid_of(const Phase &phase) {
  int64_t rows = phase.rows(), panels = divide_up(phase.op->n[1], kPanel);
  int64_t to_fit = divide_up(rows, kBlockRows), to_occupy = divide_up(kTasksPerThread * phase.threads, panels);
  if (rows >= kOwnRows * phase.threads) return {panels, divide_up(to_fit, phase.threads) * phase.threads, phase.threads};
  return {panels, std::max(to_fit, std::min(to_occupy, rows / kMinBlockRows)), 1};
}

int64_t split(Phase &phase) {
  Grid grid = grid_of(phase);
  return grid.panels * grid.blocks;
}

// A linear layer's result from its sums.
template <class T> struct Output {
  const float *bias;
  const T *residual;
  T *out;
  int64_t N, stride, residual_stride;

  void write(int64_t row, int64_t column, const float *sums) const {
    int64_t width = std::min<int64_t>(kPanel, N - column);
    T *to = out + row * stride + column;
    for (int64_t j = 0; j < width; j += kLanes) {
      V v = load(sums + j);
      if (bias) v = v + load(bias + column + j, width - j);
      if (residual) v = load(residual + row * residual_stride + column + j, width - j) + round_to<T>(v);
      store(to + j, v, width - j);
    }
  }
};

// The rows of a task, times one panel or two of a kind side by side.
template <class T, int panels> class Work {
  using Left = typename Multiply<T>::Left;

 public:
  Work(const Phase &phase, Task task, Thread &thread)
      : x_(phase.pointer<const T>(0)), stride_(phase.op->n[2]), K_(phase.op->n[0]), size_(panel_size<T>(K_)),
        soon_(phase.soon), pieces_(part_of(soon_.count, task.index, phase.num_tasks)) {
    Grid grid = grid_of(phase);
    const int64_t panel = grid.panel(task.index), block = grid.block(task.index);
    rows_ = part_of(phase.rows(), block, grid.blocks);
    column_ = panel * kPanel;
    weights_ = phase.pointer<const T>(1) + panel * panels * size_;
    const bool goes_on = panel + 1 < grid.panels && task.index + grid.together() < task.end;
    const Range share = part_of(size_ * panels * static_cast<int64_t>(sizeof(T)), block % grid.together(), grid.together());
    const char *next = reinterpret_cast<const char *>(weights_ + panels * size_) + share.begin;
    next_ = goes_on ? Span{next, share.end - share.begin} : nothing();
    size_t widened = std::is_same<T, Left>::value ? 0 : static_cast<size_t>(kTileRows * K_ + kLanes);
    sums_ = thread.scratch<float>(static_cast<size_t>(panels * kTileSums) + widened);
  }

  int64_t column() const { return column_; }

  // Calls finish(row, sums) for each row, `sums` [panels][kTileSums] from that row on. What `finish` does with one tile
  // overlaps with the products of the next.
  template <class F> void run(F &&finish) const {
    const int64_t count = rows_.end - rows_.begin, tiles = divide_up(count, kTileRows);
    const int64_t parts = tiles * panels;
    const int64_t steps = kPanelVectors / tile_vectors(kTileRows) * std::max<int64_t>(1, K_ / Multiply<T>::depth);
    Ahead ahead;
    ahead.next = Stream(tiles > 1 ? next_ : nothing(), parts * steps);
    const int64_t share = pieces_.end - pieces_.begin;
    int64_t piece = pieces_.begin;
    for (int64_t i = 0; i < tiles; i++) {
      const Range part = part_of(count, i, tiles);  // heights differ by one at most
      const int64_t first = rows_.begin + part.begin;
      const int height = static_cast<int>(part.end - part.begin);
      int64_t left_stride = stride_;
      Left *widened = reinterpret_cast<Left *>(sums_ + panels * kTileSums);
      const Left *left = left_rows(x_ + first * stride_, stride_, height, K_, widened, &left_stride);
      for (int p = 0; p < panels; p++) {
        const bool is_due = piece < pieces_.end && piece - pieces_.begin <= (i * panels + p) * share / parts;
        ahead.soon = Stream(is_due ? soon_[piece++] : nothing(), steps);
        multiply_tile(height, Tile<T>{left, left_stride, weights_ + p * size_, K_, sums_ + p * kTileSums}, ahead);
      }
      for (int row = 0; row < height; row++) finish(first + row, sums_ + row * kPanel);
    }
  }

 private:
  // To prefetch what is near anyway costs nothing; an address that is none costs a walk through the page tables.
  Span nothing() const { return {reinterpret_cast<const char *>(weights_), 0}; }

  const T *x_;
  int64_t stride_, K_, size_;  // size: numbers in a panel
  const Pieces &soon_;
  Range pieces_;  // of them, for this task
  Range rows_;
  int64_t column_;
  const T *weights_;
  Span next_;  // this task's share of the panels that its thread reads next
  float *sums_;
};

template <class T> void run_linear(const Phase &phase, Task task, Thread &thread) {
  const ClOp &op = *phase.op;
  Work<T, 1> work(phase, task, thread);
  Output<T> output{phase.pointer<const float>(2), phase.pointer<const T>(4), phase.pointer<T>(3), op.n[1], op.n[3],
                   op.n[4]};
  work.run([&](int64_t row, const float *sums) { output.write(row, work.column(), sums); });
}

// act(gate) * up, each rounded as the modules would that compute them one by one.
template <class T> CL_INLINE V gated(int64_t act, V gate, V up) {
  return round_to<T>(activate<T>(act, round_to<T>(gate))) * round_to<T>(up);
}

template <class T> void run_gated(const Phase &phase, Task task, Thread &thread) {
  const ClOp &op = *phase.op;
  const float *bias = phase.pointer<const float>(2);
  Work<T, 2> work(phase, task, thread);
  const int64_t column = work.column(), N = op.n[1], width = std::min<int64_t>(kPanel, N - column);
  work.run([&](int64_t row, const float *sums) {
    T *out = phase.pointer<T>(3) + row * op.n[3] + column;
    for (int64_t j = 0; j < width; j += kLanes) {
      V g = load(sums + j), u = load(sums + kTileSums + j);
      if (bias) {
        g = g + load(bias + column + j, width - j);
        u = u + load(bias + N + column + j, width - j);
      }
      store(out + j, gated<T>(op.n[4], g, u), width - j);
    }
  });
}

Error check_sizes(const Phase &phase) {
  const ClOp &op = *phase.op;
  if (!op.p[0] || !op.p[1] || !op.p[3]) return kMissingPointer;
  return op.n[0] > 0 && op.n[1] > 0 ? kOk : kBadSize;
}

Error check_gated(const Phase &phase) {
  if (Error error = check_sizes(phase)) return error;
  return is_activation(phase.op->n[4]) ? kOk : kUnsupported;
}

void linear(const Phase &phase, Task task, Thread &thread) {
  with_type(phase.op->type, [&](auto type) { run_linear<decltype(type)>(phase, task, thread); });
}

void gated(const Phase &phase, Task task, Thread &thread) {
  with_type(phase.op->type, [&](auto type) { run_gated<decltype(type)>(phase, task, thread); });
}

template <int panels_together> Span weights(const Phase &phase, Range tasks) {
  return with_type(phase.op->type, [&](auto type) {
    using T = decltype(type);
    const Grid grid = grid_of(phase);
    const int64_t size = panel_size<T>(phase.op->n[0]) * panels_together;
    const int64_t first = grid.panel(tasks.begin), panels = divide_up(tasks.end - tasks.begin, grid.together());
    const T *begin = phase.pointer<const T>(1) + first * size;
    return Span{reinterpret_cast<const char *>(begin), panels * size * static_cast<int64_t>(sizeof(T))};
  });
}

// How many pieces the tasks prefetch for a later phase: one for each tile and panel. A single tile waits for its own
// weights, and where there are many, arithmetic takes longer than memory.
template <int panels_together> int64_t room(const Phase &phase) {
  const int64_t tiles = divide_up(phase.rows(), kTileRows);
  return tiles < 2 || phase.rows() > kBlockRows ? 0 : grid_of(phase).panels * panels_together * tiles;
}

// Packing ----------------------------------------------------------------------------------------------------------

// One panel: `rows` (at most 48) rows of W.
template <class T> void pack_panel(const T *W, int64_t stride, int64_t rows, int64_t K, T *out) {
  constexpr int depth = Multiply<T>::depth;
  for (int64_t k = 0; k < K; k += depth)
    for (int64_t j = 0; j < kPanel; j++)
      for (int64_t d = 0; d < depth; d++) *out++ = j < rows && k + d < K ? W[j * stride + k + d] : T{};
}

// The panels of `count` matrices of one shape, interleaved.
template <class T>
void pack(const T *const *matrices, int64_t count, int64_t stride, int64_t N, int64_t K, T *out) {
  const int64_t size = panel_size<T>(K);
  parallel_for(divide_up(N, kPanel) * count, [=](int64_t i) {
    int64_t row = i / count * kPanel;
    pack_panel(matrices[i % count] + row * stride, stride, std::min<int64_t>(kPanel, N - row), K, out + i * size);
  });
}

}  // namespace

const Kernel kLinear = {check_sizes, split, linear, weights<1>, room<1>};
const Kernel kGated = {check_gated, split, gated, weights<2>, room<2>};

}  // namespace cl

int64_t cl_packed_bytes(int type, int64_t N, int64_t K) {
  return cl::with_type(type, [&](auto tag) {
    using T = decltype(tag);
    return cl::divide_up(N, cl::kPanel) * cl::panel_size<T>(K) * static_cast<int64_t>(sizeof(T));
  });
}

void cl_pack(int type, const void *W, int64_t stride, int64_t N, int64_t K, void *out) {
  cl::with_type(type, [&](auto tag) {
    using T = decltype(tag);
    const T *matrices[] = {static_cast<const T *>(W)};
    cl::pack(matrices, 1, stride, N, K, static_cast<T *>(out));
  });
}

void cl_pack_gated(int type, const void *G, const void *U, int64_t stride, int64_t N, int64_t K, void *out) {
  cl::with_type(type, [&](auto tag) {
    using T = decltype(tag);
    const T *matrices[] = {static_cast<const T *>(G), static_cast<const T *>(U)};
    cl::pack(matrices, 2, stride, N, K, static_cast<T *>(out));
  });
}
