// Checks that several entries share. Each returns 0, or an error code after one line on standard error.
#pragma once
#include <cstdint>

namespace llmk {

// Slots must be below num_slots. A negative slot is allowed: the token is not written.
int check_slots(const char* op, const int32_t* slots, int64_t tokens, int64_t num_slots);

// Positions must be rows of the rotary tables.
int check_positions(const char* op, const int32_t* positions, int64_t tokens, int64_t table_rows);

}  // namespace llmk
