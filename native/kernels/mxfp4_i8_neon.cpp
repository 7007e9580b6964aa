// MXFP4 weights, 8-bit fixed-point activations.
#include "simd_neon.h"
#include "table.h"
#include "tile_int.h"

namespace moedecode {

template <>
void tile<Neon, Format::MXFP4, ScaleKind::E8M0, ActRep::I8>(const TileCall& c) {
  IntTile<Neon, ActRep::I8>::run(c);
}

}  // namespace moedecode
