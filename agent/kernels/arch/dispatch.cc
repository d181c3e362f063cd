// Chooses the table of kernels for this processor at the first call and keeps it. setup.py defines
// LLMK_INSTRUCTION_SETS(X), which lists X(isa) for each instruction set that was compiled, the fastest first. It also
// defines LLMK_HAVE_<ISA> for each of them.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../common/kernel_table.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(LLMK_HAVE_AVX512_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace llmk {

#define LLMK_DECLARE_TABLE(isa) namespace isa { extern const KernelTable kTable; }
LLMK_INSTRUCTION_SETS(LLMK_DECLARE_TABLE)

namespace {

// The compiled tables, the fastest instruction set first.
#define LLMK_TABLE_OF(isa) &isa::kTable,
const KernelTable* const kCompiled[] = {LLMK_INSTRUCTION_SETS(LLMK_TABLE_OF)};

#ifdef LLMK_HAVE_AVX512_AMX
// Returns true if this process may use the tile registers of AMX, and asks Linux for the permission. The permission is
// for the whole process and permanent (arch_prctl(2)).
bool may_use_tiles() {
  constexpr unsigned kBFloat16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kWanted = kBFloat16 | kTile | kInt8;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kWanted) != kWanted) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

bool processor_runs(const char* isa) {
  if (std::strcmp(isa, "portable") == 0) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (std::strcmp(isa, "avx2") == 0) return avx2;
  if (std::strcmp(isa, "avx512") == 0) return avx512;
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  if (std::strcmp(isa, "avx512_vnni") == 0) return vnni;
#ifdef LLMK_HAVE_AVX512_BF16
  if (std::strcmp(isa, "avx512_bf16") == 0) return vnni && __builtin_cpu_supports("avx512bf16");
#endif
#ifdef LLMK_HAVE_AVX512_AMX
  if (std::strcmp(isa, "avx512_amx") == 0) return vnni && __builtin_cpu_supports("avx512bf16") && may_use_tiles();
#endif
#elif defined(__aarch64__)
  constexpr unsigned long kDotProducts = 1ul << 20, kMatrixInt8 = 1ul << 13;  // HWCAP_ASIMDDP, HWCAP2_I8MM
  const bool dot = (getauxval(AT_HWCAP) & kDotProducts) != 0;
  if (std::strcmp(isa, "neon_dot") == 0) return dot;
  if (std::strcmp(isa, "neon_i8mm") == 0) return dot && (getauxval(AT_HWCAP2) & kMatrixInt8) != 0;
#endif
  return false;
}

const KernelTable& choose() {
  const char* wanted = std::getenv("LLM_KERNELS_ISA");
  for (const KernelTable* table : kCompiled) {
    if (wanted != nullptr && *wanted != '\0' && std::strcmp(wanted, table->isa) != 0) continue;
    if (processor_runs(table->isa)) return *table;
  }
  std::fprintf(stderr, "llm_kernels: LLM_KERNELS_ISA is \"%s\"; this build on this processor offers:", wanted);
  for (const KernelTable* table : kCompiled) {
    if (processor_runs(table->isa)) std::fprintf(stderr, " %s", table->isa);
  }
  std::fprintf(stderr, "\n");
  std::exit(2);
}

}  // namespace

const KernelTable& kernels() {
  static const KernelTable& table = choose();
  return table;
}

}  // namespace llmk
