// MXFP4 weights, 16-bit fixed-point activations.
#include "simd_avx512.h"
#include "table.h"
#include "tile_int.h"

namespace moedecode {

template <>
void tile<Avx512, Format::MXFP4, ScaleKind::E8M0, ActRep::I16>(const TileCall& c) {
  IntTile<Avx512, ActRep::I16>::run(c);
}

}  // namespace moedecode
