// A program that prints which of the instruction sets in its arguments this processor runs. tools/kernel_build.py runs
// the program to choose the sets to compile. The program is not a part of the library.
#include <cstdio>

#include "processor.h"

int main(int count, char** names) {
  for (int i = 1; i < count; ++i) {
    if (llmk::processor_runs(names[i])) std::puts(names[i]);
  }
}
