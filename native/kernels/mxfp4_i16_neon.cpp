// MXFP4 weights, 16-bit fixed-point activations.
#include "simd_neon.h"
#include "table.h"
#include "tile_int.h"

namespace moedecode {

template <>
void tile<Neon, Format::MXFP4, ScaleKind::E8M0, ActRep::I16>(const TileCall& c) {
  IntTile<Neon, ActRep::I16>::run(c);
}

}  // namespace moedecode
