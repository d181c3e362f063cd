// Reports which instruction sets this processor runs. tools/kernel_build.py defines LLMK_HAVE_<ISA> for each set that
// the compiler knows.
#pragma once
#include <cstring>

#if defined(__aarch64__)
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif
#ifdef LLMK_HAVE_AVX512_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace llmk {

#ifdef LLMK_HAVE_AVX512_AMX
// Asks Linux for the permission to use the tile registers of AMX (arch_prctl(2)). Returns true if the process has it.
// The permission is for the whole process and cannot be lost.
inline bool may_use_tiles() {
  constexpr unsigned kBFloat16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kWanted = kBFloat16 | kTile | kInt8;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kWanted) != kWanted) return false;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

#ifdef __x86_64__
// Returns true if the processor has AVX-VNNI: bit 4 of EAX in leaf 7, subleaf 1, of CPUID (Intel's manual, volume 2A).
inline bool has_avx_vnni() {
  constexpr unsigned kAvxVnni = 1u << 4;
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & kAvxVnni) != 0;
}
#endif

// Returns true if this process may execute the instructions of the set `isa`.
inline bool processor_runs(const char* isa) {
  if (std::strcmp(isa, "portable") == 0) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (std::strcmp(isa, "avx2") == 0) return avx2;
  if (std::strcmp(isa, "avx2_vnni") == 0) return avx2 && has_avx_vnni();
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
  // Linux reports SDOT in HWCAP, and the matrix instructions of int8 and bfloat16 in HWCAP2 (asm/hwcap.h).
  constexpr unsigned long kDotProducts = 1ul << 20, kMatrixInt8 = 1ul << 13, kBFloat16 = 1ul << 14;
  const bool dot = (getauxval(AT_HWCAP) & kDotProducts) != 0;
  if (std::strcmp(isa, "neon_dot") == 0) return dot;
  const bool matrix = dot && (getauxval(AT_HWCAP2) & kMatrixInt8) != 0;
  if (std::strcmp(isa, "neon_i8mm") == 0) return matrix;
  if (std::strcmp(isa, "neon_bf16") == 0) return matrix && (getauxval(AT_HWCAP2) & kBFloat16) != 0;
#endif
  return false;
}

}  // namespace llmk
