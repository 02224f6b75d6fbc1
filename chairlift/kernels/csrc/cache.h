// Where keys and values lie inside the pages of one layer.
//
// A block holds page_size / 16 units of 16 tokens; a unit holds, head after head, keys as [head_dim / depth][16][depth]
// and values as [16 / depth][columns][depth], where `depth` is how many neighbours `Multiply<T>` takes at once and
// `columns` is head_dim rounded up to whole vectors. So sixteen keys fill a vector and no sum runs across lanes, and the
// first n tokens of a block lie in its first round_up(n, 16) / 16 units.
//
// A unit that is reused holds what its former owner left in slots not yet written, NaN perhaps. Readers therefore never
// use a value slot behind the last token they see (not even times 0), and select keys instead of multiplying by a mask.
#pragma once
#include "runtime.h"

namespace cl {

inline constexpr int64_t kUnit = 16;

struct CacheShape {
  int64_t heads, head_dim;

  int64_t columns() const { return divide_up(head_dim, kLanes) * kLanes; }
  int64_t key_elements() const { return kUnit * head_dim; }
  int64_t head_elements() const { return key_elements() + kUnit * columns(); }
  int64_t unit_elements() const { return heads * head_elements(); }
};

// The pages of one request in one layer.
template <class T> struct Pages {
  T *cache;
  const int32_t *table;
  int64_t block_stride, units_per_page;
  CacheShape shape;

  T *keys(int64_t unit, int64_t head) const {
    int64_t block = table[unit / units_per_page];
    return cache + block * block_stride + unit % units_per_page * shape.unit_elements() + head * shape.head_elements();
  }
  T *values_behind(T *keys) const { return keys + shape.key_elements(); }

  // Writes where the keys of units [from, to) begin; returns the end of the list.
  const T **list(int64_t from, int64_t to, int64_t head, const T **out) const {
    const T *at_head = cache + head * shape.head_elements();
    int64_t page = from / units_per_page, unit = from % units_per_page;
    for (int64_t i = from; i < to; i++) {
      *out++ = at_head + table[page] * block_stride + unit * shape.unit_elements();
      if (++unit == units_per_page) unit = 0, page++;
    }
    return out;
  }
};

template <class T>
CL_INLINE Pages<T> pages_of(T *cache, const ClGroup &group, const ClRequest &request, CacheShape shape) {
  return {cache, group.tables + request.table_row * group.table_stride, group.block_stride, group.page_size / kUnit,
          shape};
}

}  // namespace cl
