// WidenedForm (paged_units.h): float32 products with keys and values of bfloat16, for tasks with few rows. Each
// product converts the units of the cache in registers, instead of converting them once to a panel of floats. With few
// rows, this takes less time than writing and reading the panel.
//
// A row has one float for each element of a unit. All rows are multiplied by the first element, then all rows by the
// second, and so on. So a sum adds its terms in the order of FloatForm and has the same bits.
#pragma once

#ifdef LLMK_VEC_AVX2
namespace llmk::LLMK_ARCH::paged {

template <class C>
struct WidenedProduct : FloatProduct {
  static_assert(sizeof(C) == 2, "the cache is bfloat16");
  static constexpr int kParts = 2;
  static LLMK_MEMBER Vec part(const Unit* p, int i) {
    const Ints units = load_ints(p);
    return i == 0 ? low_bfloats(units) : high_bfloats(units);
  }
};

template <class C>
struct WidenedForm : FloatForm {
  using ScoreProduct = WidenedProduct<C>;
  using ValueProduct = WidenedProduct<C>;
  static constexpr int kPerUnit = 2, kRowWords = kPerUnit;
  static constexpr bool kPacks = false;  // products read 4-byte units of the cache itself, so nothing is packed
};

}  // namespace llmk::LLMK_ARCH::paged
#endif
