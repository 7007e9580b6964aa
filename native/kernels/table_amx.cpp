// The table of the amx kernels: those of avx512, and tile registers where they help.
#include "simd_avx512.h"
#include "table.h"

namespace moedecode {

void bf16_pair_amx(const TileCall&);

const Kernels& amx_kernels() {
  static const Kernels table = [] {
    Kernels t = make_table<Avx512>();
    t.isa = "amx";
    t.tile(Format::BF16, ScaleKind::None, ActRep::BF16Pair) = bf16_pair_amx;
    return t;
  }();
  return table;
}

}  // namespace moedecode
