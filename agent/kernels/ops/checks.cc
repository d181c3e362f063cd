#include "checks.h"

#include "../common/check.h"

namespace llmk {

int check_slots(const char* op, const int32_t* slots, int64_t tokens, int64_t num_slots) {
  for (int64_t i = 0; i < tokens; ++i) {
    if (slots[i] >= num_slots) return refuse_index(op, "slot_mapping", i, slots[i], num_slots);
  }
  return 0;
}

int check_positions(const char* op, const int32_t* positions, int64_t tokens, int64_t table_rows) {
  for (int64_t i = 0; i < tokens; ++i) {
    if (positions[i] < 0 || positions[i] >= table_rows) {
      return refuse_index(op, "positions", i, positions[i], table_rows);
    }
  }
  return 0;
}

}  // namespace llmk
