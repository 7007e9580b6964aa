// MXFP4 weights, float activations.
#include "simd_avx512.h"
#include "table.h"
#include "tile_float.h"

namespace moedecode {

template <>
void tile<Avx512, Format::MXFP4, ScaleKind::E8M0, ActRep::F32>(const TileCall& c) {
  FloatTile<Avx512, Format::MXFP4, ScaleKind::E8M0>::run(c);
}

}  // namespace moedecode
