// The table of the portable kernels.
#include "simd_portable.h"
#include "table.h"

namespace moedecode {

const Kernels& portable_kernels() {
  static const Kernels table = make_table<Portable>();
  return table;
}

}  // namespace moedecode
