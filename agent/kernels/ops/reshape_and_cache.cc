#include "reshape_and_cache.h"

#include <cstring>

#include "../common/thread_pool.h"
#include "../common/types.h"

namespace llmk {

void scatter_rows(const void* rows, void* cache, const int32_t* slots, int64_t tokens, int64_t row_bytes) {
  if (tokens == 0 || row_bytes == 0) return;
  const int64_t per_task = larger(1, 65536 / row_bytes);
  parallel_for(ceil_div(tokens, per_task), [&](int64_t task) {
    const int64_t end = smaller((task + 1) * per_task, tokens);
    for (int64_t token = task * per_task; token < end; ++token) {
      if (slots[token] < 0) continue;
      std::memcpy(static_cast<char*>(cache) + slots[token] * row_bytes,
                  static_cast<const char*>(rows) + token * row_bytes, static_cast<size_t>(row_bytes));
    }
  });
}

}  // namespace llmk
