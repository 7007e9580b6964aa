// The table of the neon kernels.
#include "simd_neon.h"
#include "table.h"

namespace moedecode {

const Kernels& neon_kernels() {
  static const Kernels table = make_table<Neon>();
  return table;
}

}  // namespace moedecode
