// MXFP4 weights, 16-bit fixed-point activations.
#include "simd_portable.h"
#include "table.h"
#include "tile_int.h"

namespace moedecode {

template <>
void tile<Portable, Format::MXFP4, ScaleKind::E8M0, ActRep::I16>(const TileCall& c) {
  IntTile<Portable, ActRep::I16>::run(c);
}

}  // namespace moedecode
