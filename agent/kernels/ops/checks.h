// Checks of indices. Each returns 0, or writes one line to standard error and returns an error code.
#pragma once
#include <cstdint>

namespace llmk {

// Checks that all slots are below num_slots. A negative slot is allowed and means that the token is not written to the
// cache.
int check_slots(const char* op, const int32_t* slots, int64_t tokens, int64_t num_slots);

// Checks that all positions are rows of the rotary tables: 0 to table_rows - 1.
int check_positions(const char* op, const int32_t* positions, int64_t tokens, int64_t table_rows);

}  // namespace llmk
