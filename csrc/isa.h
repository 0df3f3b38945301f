// Which of the compiled kernels runs on this CPU.
#pragma once

#include <string>

#include "kernel.h"

namespace multihead {

// The kernel of the best instruction set that this CPU has, or of the one that the environment variable MULTIHEAD_ISA
// names. Chosen once. Throws std::runtime_error if that is unknown, or the CPU lacks it.
const Kernel& kernel();

// The name of the instruction set whose kernel is taken. Throws as `kernel` does.
std::string isa();

// The names of all that this CPU has, the best first, with a comma between them.
std::string isas();

}  // namespace multihead
