// MXFP4 weights, float activations.
#include "simd_portable.h"
#include "table.h"
#include "tile_float.h"

namespace moedecode {

template <>
void tile<Portable, Format::MXFP4, ScaleKind::E8M0, ActRep::F32>(const TileCall& c) {
  FloatTile<Portable, Format::MXFP4, ScaleKind::E8M0>::run(c);
}

}  // namespace moedecode
