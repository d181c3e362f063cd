// ReshapeAndCache: copies row t of `rows` [tokens, row_bytes] to row slots[t] of `cache` [slots, row_bytes]. Rows with
// a negative slot are skipped.
#pragma once
#include <cstdint>

namespace llmk {

// Copies the rows with all threads. The caller must have checked the slots (check_slots).
void scatter_rows(const void* rows, void* cache, const int32_t* slots, int64_t tokens, int64_t row_bytes);

}  // namespace llmk
