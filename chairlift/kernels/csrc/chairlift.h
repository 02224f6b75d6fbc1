// The C interface of Chairlift's CPU kernels. Framework-free: plain pointers, sizes and strides.
//
// A program is an array of operations over buffers whose addresses are fixed; cl_run executes it for one step in one
// parallel region. An operation is a phase: it is split into tasks, threads take tasks and steal from one another, and
// the phase ends when its tasks are done, not when its threads arrive. One operation alone is a program of length one.
//
// Every operation gives a row the same bits whatever rows are computed with it and however tasks fall to threads:
// each output element is one chain of additions in an order that depends on the row alone.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)  // nothing else leaves the library

#define CL_ABI 3

enum ClType { CL_F32 = 0, CL_BF16 = 1, CL_F16 = 2 };

// How many rows an operation has: the step's tokens, or the tokens that get logits.
enum ClRows { CL_TOKENS = 0, CL_LOGITS = 1 };

enum ClCode {
  CL_EMBED = 0,       // out[t] = table[token_ids[t]] * scale
  CL_GATHER = 1,      // out[r] = x[keep[r]]
  CL_ADD = 2,         // out = x + y
  CL_SCALE = 3,       // out = x * scale
  CL_NORM = 4,        // out = norm(x) of the last dimension
  CL_ADD_NORM = 5,    // sum = x + y; out = norm(sum)
  CL_LINEAR = 6,      // out = x W^T (+ bias) (+ residual)
  CL_GATED = 7,       // out = act(x G^T) * (x U^T), G and U packed panel by panel in turn
  CL_ACT = 8,         // out = act(x)
  CL_ROPE_STORE = 9,  // rotate queries and keys in place (after an optional norm of each head), write keys and values
  CL_ATTEND = 10,     // causal attention of the queries over the pages
  CL_SOFTCAP = 11,    // out = cap * tanh(x / cap)
  CL_ARGMAX = 12,     // out[t] = the first column of the largest number of x[t]
  CL_LARGEST = 13,    // out[t] = the largest numbers of x[t] and their columns
};

enum ClAct { CL_NONE = 0, CL_SILU = 1, CL_GELU_TANH = 2, CL_GELU = 3, CL_RELU = 4 };

enum ClNormFlags {
  CL_LAYER_NORM = 1,    // subtract the mean; without it RMS norm
  CL_PLUS_ONE = 2,      // weight is stored as its difference from one (Gemma)
  CL_ROUND_FIRST = 4,   // round the normalised value to the type before the weight is applied (Llama)
};

// Strides and sizes count elements. Unused fields are zero. `p` and `n` by operation:
//
// CL_EMBED       p: table, out                               n: width, out_stride                         f: scale
// CL_GATHER      p: x, out                                   n: width, x_stride, out_stride
// CL_ADD         p: x, y, out                                n: width, x_stride, y_stride, out_stride
// CL_SCALE       p: x, out                                   n: width, x_stride, out_stride               f: scale
// CL_NORM        p: x, weight|0, bias|0, out                 n: width, x_stride, out_stride, flags        f: eps
// CL_ADD_NORM    p: x, y, sum, weight|0, bias|0, out         n: width, x_stride, y_stride, sum_stride, out_stride, flags
//                                                                                                         f: eps
// CL_LINEAR      p: x, packed, bias|0, out, residual|0       n: K, N, x_stride, out_stride, residual_stride
//                bias is float32. With a residual: out = residual + round(x W^T + bias).
// CL_GATED       p: x, packed, bias|0, out                   n: K, N, x_stride, out_stride, act   (N: width of out)
//                bias is float32 [2, N]: the gate's, then that of up
//                gate and up are rounded to the type, then act(gate), rounded, times up, as the modules do one by one
// CL_ACT         p: x, out                                   n: width, x_stride, out_stride, act
// CL_ROPE_STORE  p: q, k, v, cos, sin, q_norm|0, k_norm|0, cache
//                n: q_heads, kv_heads, head_dim, rotary_dim (even, <= head_dim, 0: no rotation), q_stride, k_stride,
//                   v_stride, cos_stride, group, norm_flags, interleaved, by_position     (strides from token to token;
//                   heads are contiguous, head after head; cos and sin [T, rotary_dim] in the type of the model, or
//                   with by_position tables of all positions)
//                f: eps
// CL_ATTEND      p: q, cache, out, sinks|0                   n: q_heads, kv_heads, head_dim, q_stride, out_stride, group,
//                                                               window (0: none)
//                sinks is float32 [q_heads].                 f: scale, softcap (0: none)
// CL_SOFTCAP     p: x, out                                   n: width, x_stride, out_stride               f: cap
// CL_ARGMAX      p: x, columns, largest                      n: width (at most 2^24), x_stride
//                columns is int64 and largest float32, one of each per row. If a row holds NaN, its largest is NaN.
// CL_LARGEST     p: x, values, columns                       n: width, x_stride, count (at most width and 1024)
//                values is float32 [rows, count], largest first, columns int64 [rows, count]: of equal numbers the first
//                ones, in order. If a row holds NaN, its first value is NaN.
typedef struct {
  int32_t code;
  int32_t type;
  int32_t rows;
  int32_t reserved;
  void *p[8];
  int64_t n[12];
  float f[2];
} ClOp;

// Block tables of one group of layers. A block of the cache of one layer starts `block_stride` elements after the one
// before; inside it see cl_cache_*.
typedef struct {
  const int32_t *tables;  // [requests, table_stride]
  int64_t table_stride;
  int64_t page_size;      // tokens, a multiple of 16
  int64_t block_stride;   // elements from block to block in the cache of one layer
} ClGroup;

// One request's new tokens of a step: tokens [start, start + count) of the packed step, at positions from `position`.
typedef struct {
  int32_t start, count, position, table_row;
} ClRequest;

typedef struct {
  int64_t num_tokens, num_logits, num_requests;
  const int64_t *token_ids;    // [num_tokens]
  const int64_t *keep;         // [num_logits]
  const ClRequest *requests;   // [num_requests], by start
  const ClGroup *groups;
} ClStep;

// Runs a program. Returns 0, or an error code (see cl_error) before anything was written.
int cl_run(const ClOp *ops, int64_t num_ops, const ClStep *step);
const char *cl_error(int code);

// Weights. cl_pack lays out W [N, K] (row stride in elements) of `type`; out has cl_packed_bytes(type, N, K) bytes and is
// aligned to 64. cl_pack_gated takes two such matrices and interleaves their panels.
int64_t cl_packed_bytes(int type, int64_t N, int64_t K);
void cl_pack(int type, const void *W, int64_t stride, int64_t N, int64_t K, void *out);
void cl_pack_gated(int type, const void *G, const void *U, int64_t stride, int64_t N, int64_t K, void *out);

// The cache of one layer: elements that one block of `page_size` tokens takes (keys and values together). Tokens lie in
// units of 16; the first n tokens of a block are its first cl_cache_elements(type, round_up(n, 16), ...) elements.
int64_t cl_cache_elements(int type, int64_t page_size, int64_t kv_heads, int64_t head_dim);

int cl_abi(void);
const char *cl_isa(void);            // "avx512_bf16", "avx512", "avx2", "portable", "neon"
void cl_set_threads(int threads);    // of the OpenMP pool, for programs that the calling thread runs; 0: all

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
