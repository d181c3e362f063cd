// Chooses the table of kernels for this processor at the first call and keeps it. tools/kernel_build.py defines
// LLMK_INSTRUCTION_SETS(X), which lists X(isa, general, floats, bfloats, bytes) for each instruction set that was
// compiled, the fastest first. The names after `isa` are the sets whose parts it uses.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "../common/kernel_table.h"
#include "processor.h"

namespace llmk {

#define LLMK_DECLARE_PARTS(isa, general, floats, bfloats, bytes) \
  namespace general { extern const GeneralKernels kGeneral; } \
  namespace floats { extern const ProductKernels kFloats; } \
  namespace bfloats { extern const ProductKernels kBFloats; } \
  namespace bytes { extern const ProductKernels kBytes; }
LLMK_INSTRUCTION_SETS(LLMK_DECLARE_PARTS)

namespace {

// Returns the compiled tables, the fastest instruction set first.
const std::vector<KernelTable>& tables() {
#define LLMK_TABLE_OF(isa, general, floats, bfloats, bytes) \
  {general::kGeneral, #isa, floats::kFloats, bfloats::kBFloats, bytes::kBytes},
  static const std::vector<KernelTable> compiled = {LLMK_INSTRUCTION_SETS(LLMK_TABLE_OF)};
  return compiled;
}

// Returns the names of the compiled tables, separated by spaces. If `all` is false, returns only the names of the
// tables that this processor can run.
std::string names(bool all) {
  std::string text;
  for (const KernelTable& table : tables()) {
    if (all || processor_runs(table.isa)) text += (text.empty() ? "" : " ") + std::string(table.isa);
  }
  return text;
}

[[noreturn]] void refuse(const char* wanted) {
  const std::string all = names(true), usable = names(false);
  if (wanted == nullptr) {
    std::fprintf(stderr, "llm_kernels: this processor runs none of the instruction sets in this library\n");
  } else {
    std::fprintf(stderr, "llm_kernels: LLM_KERNELS_ISA is \"%s\"; this build on this processor offers: %s\n", wanted,
                 usable.c_str());
  }
  std::fprintf(stderr, "llm_kernels: the library was compiled with: %s; ", all.c_str());
  std::fprintf(stderr, "LLM_KERNELS_BUILD=all make clean setup compiles every set\n");
  std::exit(2);
}

const KernelTable& choose() {
  const char* wanted = std::getenv("LLM_KERNELS_ISA");
  if (wanted != nullptr && *wanted == '\0') wanted = nullptr;
  for (const KernelTable& table : tables()) {
    if (wanted != nullptr && std::strcmp(wanted, table.isa) != 0) continue;
    if (processor_runs(table.isa)) return table;
  }
  refuse(wanted);
}

}  // namespace

const ProductKernels& KernelTable::products(WeightFormat format) const {
  if (traits_of(format).quantizes_rows) return bytes;
  return format == WeightFormat::kFloat32 || format == WeightFormat::kFloat16 ? floats : bfloats;
}

void KernelTable::linear(const LinearArgs& args) const {
  if (args.rows > 0) products(header_of(args.weight).format).linear(args);
}

void KernelTable::rotary_attention(const RotaryAttentionArgs& args) const {
  (args.int8_cache ? bytes : args.dtype == DType::kBFloat16 ? bfloats : floats).attention(args);
}

const KernelTable& kernels() {
  static const KernelTable& table = choose();
  return table;
}

const char* compiled_sets() {
  static const std::string sets = names(true);
  return sets.c_str();
}

}  // namespace llmk
