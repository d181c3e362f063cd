// ReshapeAndCache: copies rows [tokens, row_bytes] to cache [slots, row_bytes] at slots[token]. Skips negative slots.
#pragma once
#include <cstdint>

namespace llmk {

// Copies the rows with all threads. The caller must have checked the slots (check_slots).
void scatter_rows(const void* rows, void* cache, const int32_t* slots, int64_t tokens, int64_t row_bytes);

}  // namespace llmk
