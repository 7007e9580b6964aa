// The table of the avx512 kernels.
#include "simd_avx512.h"
#include "table.h"

namespace moedecode {

const Kernels& avx512_kernels() {
  static const Kernels table = make_table<Avx512>();
  return table;
}

}  // namespace moedecode
