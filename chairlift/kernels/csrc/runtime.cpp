// The run of a program: threads, phases, tasks. See runtime.h.
#include "runtime.h"

#include <sched.h>
#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <memory>

// The entry points of OpenMP's run-time library that `#pragma omp parallel` compiles to. Called by name, a library
// built by any compiler runs on the pool of whichever OpenMP library PyTorch has loaded: GNU, LLVM and Intel have them.
extern "C" {
void GOMP_parallel(void (*body)(void *), void *data, unsigned num_threads, unsigned flags);
int omp_get_thread_num(void);
int omp_get_max_threads(void);
int omp_in_parallel(void);
}

namespace cl {
namespace {

constexpr int kSpins = 2000;      // pauses before a waiting thread offers its core to others
constexpr int kMoreSpins = 50;    // and between such offers
constexpr int64_t kWarmBytes = 192 << 10;  // of weights to come that a waiting thread reads into its cache at most,
constexpr int64_t kWarmStep = 1 << 10;     // some at a time
constexpr int64_t kSoonBytes = 8 << 20;    // of what a later phase reads: it stays in the cache that threads share
constexpr size_t kCacheLine = 64;

thread_local int thread_limit = 0;

const Kernel *kernel_of(int32_t code) {
  switch (code) {
    case CL_EMBED: return &kEmbed;
    case CL_GATHER: return &kGather;
    case CL_ADD: return &kAdd;
    case CL_SCALE: return &kScale;
    case CL_NORM: return &kNorm;
    case CL_ADD_NORM: return &kAddNorm;
    case CL_LINEAR: return &kLinear;
    case CL_GATED: return &kGated;
    case CL_ACT: return &kAct;
    case CL_ROPE_STORE: return &kRopeStore;
    case CL_ATTEND: return &kAttend;
    case CL_SOFTCAP: return &kSoftcap;
    case CL_ARGMAX: return &kArgmax;
    case CL_LARGEST: return &kLargest;
    default: return nullptr;
  }
}

CL_INLINE void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int pool_threads() {
  if (omp_in_parallel()) return 1;  // a nested region would have no threads of its own
  return thread_limit > 0 ? thread_limit : omp_get_max_threads();
}

void in_parallel(int threads, void (*body)(void *), void *data) {
  if (threads == 1) return body(data);
  GOMP_parallel(body, data, static_cast<unsigned>(threads), 0);
}

struct alignas(kCacheLine) Counter {
  std::atomic<int64_t> value{0};
};

// Others who want this core (an HTTP server's threads, its clients) get it when this thread has no task: one that is taken
// off in the middle of a task holds up all the others. Shorter than what the system lets a thread run undisturbed.
constexpr auto kTurn = std::chrono::microseconds(300);

// A program while it runs. Phase i is over when `done[i]` counts all of its tasks: a thread that the system has taken
// off its core holds up the task it is in, not the tasks it would have taken next.
class Program {
 public:
  Error prepare(const ClOp *ops, int64_t num_ops, const ClStep *step, int threads) {
    threads_ = threads;
    size_ = static_cast<size_t>(num_ops);
    if (phases_.size() < size_) phases_.resize(size_);
    for (size_t i = 0; i < size_; i++) {
      const Kernel *kernel = kernel_of(ops[i].code);
      if (!kernel) return kUnknownCode;
      if (ops[i].type < CL_F32 || ops[i].type > CL_F16) return kUnknownType;
      Phase &phase = phases_[i].phase;
      phases_[i].kernel = kernel;
      phase.op = &ops[i];
      phase.step = step;
      phase.threads = threads;
      phase.notes.clear();
      phase.soon = {};
      if (phase.rows() == 0) continue;  // nothing to do, whatever it points at
      if (Error error = kernel->check(phase)) return error;
    }
    return kOk;
  }

  void run() {
    int64_t most = 0;
    for (size_t i = 0; i < size_; i++) {
      Phase &phase = phases_[i].phase;
      phase.num_tasks = phase.rows() > 0 ? phases_[i].kernel->split(phase) : 0;
      most = std::max(most, phase.num_tasks);
    }
    if (most < 2) threads_ = 1;
    look_ahead();
    reset_counters();
    in_parallel(threads_, [](void *self) { static_cast<Program *>(self)->work(); }, this);
  }

 private:
  struct Entry {
    Phase phase;
    const Kernel *kernel;
  };

  // Places of what operations read that differ in their pointers alone: of layers of one kind.
  struct List {
    const ClOp *op;
    std::vector<int64_t> places;
  };

  // While products are calculated, memory has time for what the phase behind them reads.
  void look_ahead() {
    num_lists_ = 0;
    size_t begin = 0;
    for (size_t i = 0; i < size_; i++) {
      if (!phases_[i].kernel->reads || phases_[i].phase.num_tasks == 0) continue;
      share_reads(begin, i);
      begin = i + 1;
    }
  }

  // Phases [begin, reader) prefetch for phase `reader`.
  void share_reads(size_t begin, size_t reader) {
    int64_t room = 0, given = 0;
    for (size_t i = begin; i < reader; i++) room += room_of(i);
    if (room == 0) return;
    const Pieces pieces = phases_[reader].kernel->reads(phases_[reader].phase);
    const std::vector<int64_t> &places = places_of(reader);
    const int64_t count = std::min({static_cast<int64_t>(places.size()), room, kSoonBytes / pieces.bytes});
    for (size_t i = begin; i < reader; i++) {
      const Range share = {count * given / room, count * (given + room_of(i)) / room};
      phases_[i].phase.soon = {pieces.base, pieces.bytes, share.end - share.begin, places.data() + share.begin};
      given += room_of(i);
    }
  }

  int64_t room_of(size_t i) const {
    const Entry &entry = phases_[i];
    return entry.kernel->room && entry.phase.num_tasks > 0 ? entry.kernel->room(entry.phase) : 0;
  }

  const std::vector<int64_t> &places_of(size_t reader) {
    const Phase &phase = phases_[reader].phase;
    auto is_like = [op = phase.op](const List &list) {
      return list.op->type == op->type && std::equal(std::begin(op->n), std::end(op->n), list.op->n);
    };
    const auto end = lists_.begin() + num_lists_;
    if (auto found = std::find_if(lists_.begin(), end, is_like); found != end) return found->places;
    if (end == lists_.end()) lists_.emplace_back();
    List &list = lists_[static_cast<size_t>(num_lists_++)];
    list.op = phase.op;
    list.places.clear();
    phases_[reader].kernel->list(phase, list.places);
    return list.places;
  }

  void reset_counters() {
    size_t needed = size_ * static_cast<size_t>(threads_ + 1);
    if (num_counters_ < needed) {
      counters_.reset(new Counter[needed]);
      num_counters_ = needed;
      return;
    }
    for (size_t i = 0; i < needed; i++) counters_[i].value.store(0, std::memory_order_relaxed);
  }

  Counter &taken(size_t phase, int thread) {
    return counters_[phase * static_cast<size_t>(threads_ + 1) + static_cast<size_t>(thread)];
  }
  Counter &done(size_t phase) { return taken(phase, threads_); }

  void work() {
    thread_local Thread thread;
    int me = threads_ == 1 ? 0 : omp_get_thread_num();
    Ahead ahead{0, nullptr, nullptr};
    auto turn = std::chrono::steady_clock::now();
    for (size_t i = 0; i < size_; i++) {
      run_tasks(i, me, thread);
      if (auto now = std::chrono::steady_clock::now(); now - turn > kTurn) {
        sched_yield();
        turn = now;
      }
      wait(i, me, ahead);
    }
  }

  // Where a thread is in prefetching the weights of a phase to come.
  struct Ahead {
    size_t phase;
    const char *next, *end;
  };

  // Memory need not idle while a thread waits: the next weights that this thread will read are known.
  void prefetch_weights(size_t after, int me, Ahead &ahead) {
    if (ahead.phase <= after) {
      ahead = {after + 1, nullptr, nullptr};
      while (ahead.phase < size_ && !has_weights(ahead.phase)) ahead.phase++;
      if (ahead.phase == size_) return;
      const Phase &phase = phases_[ahead.phase].phase;
      Span span = phases_[ahead.phase].kernel->weights(phase, part_of(phase.num_tasks, me, threads_));
      ahead.next = span.begin;
      ahead.end = span.begin + std::min(span.bytes, kWarmBytes);
    }
    for (int64_t n = std::min<int64_t>(kWarmStep, ahead.end - ahead.next); n > 0; n -= kCacheLine) {
      prefetch(ahead.next);
      ahead.next += kCacheLine;
    }
  }

  bool has_weights(size_t i) const { return phases_[i].kernel->weights && phases_[i].phase.num_tasks > 0; }

  // First this thread's own range of tasks, then what is left of the others'.
  void run_tasks(size_t i, int me, Thread &thread) {
    const Phase &phase = phases_[i].phase;
    int64_t finished = 0;
    for (int k = 0; k < threads_; k++) {
      int owner = (me + k) % threads_;
      Range range = part_of(phase.num_tasks, owner, threads_);
      std::atomic<int64_t> &next = taken(i, owner).value;
      while (range.begin + next.load(std::memory_order_relaxed) < range.end) {
        int64_t index = range.begin + next.fetch_add(1, std::memory_order_relaxed);
        if (index >= range.end) break;
        phases_[i].kernel->run(phase, Task{index, range.end}, thread);
        finished++;
      }
    }
    if (finished) done(i).value.fetch_add(finished, std::memory_order_acq_rel);
  }

  void wait(size_t i, int me, Ahead &ahead) {
    const std::atomic<int64_t> &finished = done(i).value;
    int64_t all = phases_[i].phase.num_tasks;
    for (int spins = 0; finished.load(std::memory_order_acquire) < all;) {
      prefetch_weights(i, me, ahead);
      if (++spins <= kSpins) {
        pause();
      } else {
        sched_yield();
        spins = kSpins - kMoreSpins;
      }
    }
  }

  std::vector<Entry> phases_;
  std::deque<List> lists_;  // the first `num_lists_` are of this run
  std::ptrdiff_t num_lists_ = 0;
  std::unique_ptr<Counter[]> counters_;
  size_t size_ = 0, num_counters_ = 0;
  int threads_ = 1;
};

}  // namespace

void parallel_for(int64_t n, void (*body)(void *, int64_t), void *data) {
  struct Loop {
    int64_t n;
    void (*body)(void *, int64_t);
    void *data;
    std::atomic<int64_t> next{0};
  } loop{n, body, data};
  in_parallel(n > 1 ? pool_threads() : 1, [](void *shared) {
    Loop &all = *static_cast<Loop *>(shared);
    for (int64_t i; (i = all.next.fetch_add(1, std::memory_order_relaxed)) < all.n;) all.body(all.data, i);
  }, &loop);
}

Thread::~Thread() { free(memory_); }

void *Thread::bytes(size_t size) {
  if (size > capacity_) {
    free(memory_);
    capacity_ = (size + 4095) / 4096 * 4096;
    memory_ = aligned_alloc(4096, capacity_);
    if (!memory_) abort();  // a few pages: nothing else on this machine works either
  }
  return memory_;
}

}  // namespace cl

int cl_run(const ClOp *ops, int64_t num_ops, const ClStep *step) {
  thread_local cl::Program program;  // of the calling thread: its memory is kept from run to run
  if (cl::Error error = program.prepare(ops, num_ops, step, cl::pool_threads())) return error;
  program.run();
  return cl::kOk;
}

const char *cl_error(int code) {
  switch (code) {
    case cl::kOk: return "no error";
    case cl::kUnknownCode: return "unknown operation";
    case cl::kUnknownType: return "unknown number type";
    case cl::kMissingPointer: return "a pointer that the operation needs is null";
    case cl::kBadSize: return "a size or stride is out of range";
    case cl::kUnsupported: return "the operation has no kernel for these sizes";
    default: return "unknown error";
  }
}

int cl_abi(void) { return CL_ABI; }
const char *cl_isa(void) { return cl::kIsa; }
void cl_set_threads(int threads) { cl::thread_limit = threads; }
