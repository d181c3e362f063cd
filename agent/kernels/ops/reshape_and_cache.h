// ReshapeAndCache: rows [tokens, row_bytes] into cache [slots, row_bytes] at slots[token]; a negative slot is skipped.
#pragma once
#include <cstdint>

namespace llmk {

// Slots are below the cache's size (check_slots).
void scatter_rows(const void* rows, void* cache, const int32_t* slots, int64_t tokens, int64_t row_bytes);

}  // namespace llmk
