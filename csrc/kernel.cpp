// The kernels of one instruction set. Compiled once for each, with MULTIHEAD_ISA as the name of its namespace.
#include "kernel.h"

#include "backward.h"
#include "forward.h"
#include "statistics.h"
#include "weights.h"

#define MULTIHEAD_JOIN_(a, b) a##b
#define MULTIHEAD_JOIN(a, b) MULTIHEAD_JOIN_(a, b)

namespace multihead {
namespace MULTIHEAD_ISA {

// Enough for whatever is run on the problem.
static size_t scratch_bytes(const Problem& p, bool with_backward) {
  Room room(nullptr);
  if (with_backward) {
    BackwardRoom backward(p, room);
  } else {
    ForwardRoom forward(p, room);
  }
  Room other(nullptr);  // `combine` and `find_seen` need no more than this, `weights` and `statistics`
  WeightsRoom weights(p, other);
  other.take(KEY_BLOCK * LANES);
  other.take(LANES * padded(p.V));
  return room.used > other.used ? room.used : other.used;
}

static const Kernel kernel = {row_blocks, scratch_bytes, forward, combine, find_seen, backward, weights, statistics};

}  // namespace MULTIHEAD_ISA

const Kernel* MULTIHEAD_JOIN(kernel_, MULTIHEAD_ISA)() { return &MULTIHEAD_ISA::kernel; }

}  // namespace multihead
