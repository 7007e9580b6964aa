// The table of the avx2 kernels.
#include "simd_avx2.h"
#include "table.h"

namespace moedecode {

const Kernels& avx2_kernels() {
  static const Kernels table = make_table<Avx2>();
  return table;
}

}  // namespace moedecode
