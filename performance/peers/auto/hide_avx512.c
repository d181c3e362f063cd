/* Hides AVX-512, AVX-VNNI and AMX from a program, which then chooses its code as on a processor with AVX2.

   The dynamic linker loads this library into the program and into all programs that it starts (LD_PRELOAD). The CPUID
   instruction then raises a fault, and the handler answers it without the bits of the hidden instructions. This needs
   the feature cpuid_fault of the processor. The library also keeps the program from replacing the handler. */

#define _GNU_SOURCE
#include <cpuid.h>
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012
#define BIT(number) (1u << (number))

typedef void (*SignalHandler)(int);
typedef int (*SigactionFunction)(int, const struct sigaction*, struct sigaction*);

/* Bits of CPUID's leaf 7. Subleaf 0 has AVX-512 and AMX. Subleaf 1 has AVX-VNNI, and what came later. */
static const unsigned kFeatures0Ebx = BIT(16) | BIT(17) | BIT(21) | BIT(26) | BIT(27) | BIT(28) | BIT(30) | BIT(31);
static const unsigned kFeatures0Ecx = BIT(1) | BIT(6) | BIT(11) | BIT(12) | BIT(14);
static const unsigned kFeatures0Edx = BIT(2) | BIT(3) | BIT(8) | BIT(22) | BIT(23) | BIT(24) | BIT(25);
static const unsigned kFeatures1Eax = BIT(4) | BIT(5) | BIT(21) | BIT(23);
static const unsigned kFeatures1Edx = BIT(4) | BIT(5) | BIT(8) | BIT(10) | BIT(19);

/* Lets this thread execute CPUID, or makes it raise a fault. Threads and processes that start later inherit this. */
static long allow_cpuid(int allowed) { return syscall(SYS_arch_prctl, ARCH_SET_CPUID, (unsigned long)allowed); }

static SigactionFunction real_sigaction(void) { return (SigactionFunction)(uintptr_t)dlsym(RTLD_NEXT, "sigaction"); }

/* Answers a CPUID instruction that raised a fault. Another fault ends the program, as without this handler. */
static void answer_cpuid(int number, siginfo_t* info, void* context) {
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  const unsigned char* code = (const unsigned char*)registers[REG_RIP];
  const int error = errno;
  (void)info;
  if (code[0] != 0x0f || code[1] != 0xa2) {
    const struct sigaction original = {.sa_handler = SIG_DFL};
    real_sigaction()(number, &original, NULL);
    return;
  }
  const unsigned leaf = (unsigned)registers[REG_RAX], subleaf = (unsigned)registers[REG_RCX];
  unsigned eax, ebx, ecx, edx;
  allow_cpuid(1);
  __cpuid_count(leaf, subleaf, eax, ebx, ecx, edx);
  allow_cpuid(0);
  if (leaf == 7 && subleaf == 0) ebx &= ~kFeatures0Ebx, ecx &= ~kFeatures0Ecx, edx &= ~kFeatures0Edx;
  if (leaf == 7 && subleaf == 1) eax &= ~kFeatures1Eax, edx &= ~kFeatures1Edx;
  registers[REG_RAX] = eax;
  registers[REG_RBX] = ebx;
  registers[REG_RCX] = ecx;
  registers[REG_RDX] = edx;
  registers[REG_RIP] += 2;
  errno = error;
}

/* Replaces the function of the C library. It ignores new handlers of the signal that CPUID raises. */
int sigaction(int number, const struct sigaction* action, struct sigaction* previous) {
  if (number != SIGSEGV || action == NULL) return real_sigaction()(number, action, previous);
  if (previous != NULL) memset(previous, 0, sizeof *previous);
  return 0;
}

/* Replaces the older function of the C library in the same way. Some libraries of vLLM's packages call it. */
SignalHandler signal(int number, SignalHandler handler) {
  if (number == SIGSEGV) return SIG_DFL;
  return ((SignalHandler(*)(int, SignalHandler))(uintptr_t)dlsym(RTLD_NEXT, "signal"))(number, handler);
}

__attribute__((constructor)) static void start(void) {
  static const char kMessage[] = "AVX-512 cannot be hidden: the processor or the kernel does not offer cpuid_fault\n";
  struct sigaction action = {.sa_sigaction = answer_cpuid, .sa_flags = SA_SIGINFO};
  if (real_sigaction()(SIGSEGV, &action, NULL) != 0 || allow_cpuid(0) != 0) {
    (void)!write(STDERR_FILENO, kMessage, sizeof kMessage - 1);
    _exit(1);
  }
}
