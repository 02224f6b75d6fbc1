// The activation functions, by the names of ClAct.
#pragma once
#include "chairlift.h"
#include "simd.h"

namespace cl {

template <class T> CL_INLINE V silu(V x) { return x / (all(1.0f) + exp_for<T>(zero() - x)); }

CL_INLINE V gelu(V x) { return all(0.5f) * x * (all(1.0f) + erf(x * all(0.707106781f))); }

CL_INLINE V gelu_tanh(V x) {
  V inner = all(0.797884561f) * fma(all(0.044715f) * x, x * x, x);
  return all(0.5f) * x * (all(1.0f) + tanh(inner));
}

// For a result that is rounded to T.
template <class T> CL_INLINE V activate(int64_t act, V x) {
  switch (act) {
    case CL_SILU: return silu<T>(x);
    case CL_GELU_TANH: return gelu_tanh(x);
    case CL_GELU: return gelu(x);
    case CL_RELU: return max(zero(), x);
    default: return x;
  }
}

CL_INLINE bool is_activation(int64_t act) { return act >= CL_NONE && act <= CL_RELU; }

}  // namespace cl
