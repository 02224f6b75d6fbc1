// How operations run: one parallel region per program, one phase per operation, tasks that threads take and steal.
//
// An operation is a `Kernel`: it checks its arguments, splits its work into tasks (on the calling thread, before
// anything runs) and runs a task (on any thread). A task must not wait for another of its phase, and what it writes
// must not depend on which thread runs it. Knows nothing of what operations compute.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <vector>

#include "chairlift.h"
#include "simd.h"

namespace cl {

enum Error {
  kOk = 0,
  kUnknownCode = 1,
  kUnknownType = 2,
  kMissingPointer = 3,
  kBadSize = 4,
  kUnsupported = 5,
};

// Part `i` of `parts` nearly equal parts of [0, n).
struct Range {
  int64_t begin, end;
};
CL_INLINE Range part_of(int64_t n, int64_t i, int64_t parts) { return {n * i / parts, n * (i + 1) / parts}; }

struct Span {
  const char *begin;
  int64_t bytes;
};

// `count` pieces of memory, of `bytes` each, by their places behind `base`.
struct Pieces {
  const char *base = nullptr;
  int64_t bytes = 0, count = 0;
  const int64_t *places = nullptr;

  Span operator[](int64_t i) const { return {base + places[i], bytes}; }
};

// One operation of a running program.
struct Phase {
  const ClOp *op;
  const ClStep *step;
  int threads;
  int64_t num_tasks;           // what `split` returned
  std::vector<int32_t> notes;  // whatever `split` wants `run` to know; empty when `split` is called
  Pieces soon;                 // what a later phase reads, to be prefetched while this one calculates

  int64_t rows() const { return op->rows == CL_LOGITS ? step->num_logits : step->num_tokens; }
  template <class T> T *pointer(int i) const { return static_cast<T *>(op->p[i]); }
};

// A task, and the end of the range [index, end) that its thread works through if nobody steals: what to prefetch.
struct Task {
  int64_t index, end;
};

// What a thread owns while it runs tasks.
class Thread {
 public:
  Thread() = default;
  Thread(const Thread &) = delete;
  Thread &operator=(const Thread &) = delete;
  ~Thread();

  // `count` numbers aligned to 64 bytes, not cleared. Valid until the next call or the end of the task.
  template <class T> T *scratch(size_t count) { return static_cast<T *>(bytes(count * sizeof(T))); }

 private:
  void *bytes(size_t size);
  void *memory_ = nullptr;
  size_t capacity_ = 0;
};

struct Kernel {
  Error (*check)(const Phase &);
  int64_t (*split)(Phase &);  // number of tasks; called, like `check`, when there are rows
  void (*run)(const Phase &, Task, Thread &);
  // The weights that tasks [begin, end) read, in order: what a thread that waits for an earlier phase may prefetch.
  Span (*weights)(const Phase &, Range tasks) = nullptr;
  // How many pieces the tasks have time to prefetch for a later phase.
  int64_t (*room)(const Phase &) = nullptr;
  // What the tasks would have to wait for: pieces, all but `count` and `places`, and the places, which are the same for
  // operations that differ in their pointers alone.
  Pieces (*reads)(const Phase &) = nullptr;
  void (*list)(const Phase &, std::vector<int64_t> &places) = nullptr;
};

// elementwise.cpp
extern const Kernel kEmbed, kGather, kAdd, kScale, kNorm, kAddNorm, kAct, kSoftcap, kArgmax, kLargest;
// gemm.cpp
extern const Kernel kLinear, kGated;
// attention.cpp
extern const Kernel kRopeStore, kAttend;

// Calls `f(T{})` with the number type that `type` names, which must be one.
template <class F> CL_INLINE auto with_type(int32_t type, F &&f) {
  switch (type) {
    case CL_BF16: return f(bf16{});
    case CL_F16: return f(f16{});
    default: return f(float{});
  }
}

CL_INLINE int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls `body(i)` for each i in [0, n), on all threads. For work outside programs.
void parallel_for(int64_t n, void (*body)(void *, int64_t), void *data);
template <class F> void parallel_for(int64_t n, F body) {
  parallel_for(n, [](void *f, int64_t i) { (*static_cast<F *>(f))(i); }, &body);
}

}  // namespace cl
