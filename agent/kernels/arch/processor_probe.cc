// Prints the instruction sets among its arguments that this processor runs. setup.py runs this program to choose the
// sets that it compiles. The program is no part of the library.
#include <cstdio>

#include "processor.h"

int main(int count, char** names) {
  for (int i = 1; i < count; ++i) {
    if (llmk::processor_runs(names[i])) std::puts(names[i]);
  }
}
