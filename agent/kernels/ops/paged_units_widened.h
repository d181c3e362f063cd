// WidenedForm (paged_units.h): float32 products with keys and values of bfloat16 or int8, which are converted in
// registers.
//
// A row has one float for each element of a unit. The elements of a unit are multiplied one after the other: first all
// rows by the first element, then all rows by the second. So a sum has the order of FloatForm, and its bits. Converting
// once for all rows of a task takes more time than FloatForm only if there are many rows.
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
  static constexpr bool kPacks = false;  // it reads only caches that have units
};

}  // namespace llmk::LLMK_ARCH::paged
#endif
