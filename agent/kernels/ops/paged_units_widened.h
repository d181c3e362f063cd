// WidenedForm (paged_units.h): float32 products with keys and values of bfloat16 or int8, for tasks with few rows. Each
// product converts the units of the cache in registers, instead of converting them once to a panel of floats. With few
// rows, this takes less time than writing and reading the panel.
//
// A row has one float for each element of a unit. All rows are multiplied by the first element, then all rows by the
// second, and so on. So a sum adds its terms in the order of FloatForm and has the same bits.
#pragma once

#ifdef LLMK_VEC_AVX2
namespace llmk::LLMK_ARCH::paged {

// Multiplies units of type C. Keys of int8 are unsigned bytes with 128 added.
template <class C, bool kKeys>
struct WidenedProduct : FloatProduct {
  static constexpr int kParts = 4 / sizeof(C);
  static LLMK_MEMBER Vec part(const Unit* p, int i) {
    const Ints units = load_ints(p);
    if constexpr (sizeof(C) == 2) {
      return i == 0 ? low_bfloats(units) : high_bfloats(units);
    } else {
      const Ints bytes = kKeys ? flip(units, kKeyBias) : units;
      const Ints moved[] = {shift_left<24>(bytes), shift_left<16>(bytes), shift_left<8>(bytes), bytes};
      return to_floats(shift_right_signed<24>(moved[i]));
    }
  }
};

template <class C>
struct WidenedForm : FloatForm {
  using ScoreProduct = WidenedProduct<C, true>;
  using ValueProduct = WidenedProduct<C, false>;
  static constexpr int kPerUnit = 4 / sizeof(C), kRowWords = kPerUnit;
  static constexpr bool kPacks = false;  // products read 4-byte units of the cache itself, so nothing is packed
};

}  // namespace llmk::LLMK_ARCH::paged
#endif
