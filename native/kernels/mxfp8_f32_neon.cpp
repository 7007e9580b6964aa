// MXFP8 weights, float activations.
#include "simd_neon.h"
#include "table.h"
#include "tile_float.h"

namespace moedecode {

template <>
void tile<Neon, Format::MXE4M3, ScaleKind::E8M0, ActRep::F32>(const TileCall& c) {
  FloatTile<Neon, Format::MXE4M3, ScaleKind::E8M0>::run(c);
}
template <>
void tile<Neon, Format::MXE5M2, ScaleKind::E8M0, ActRep::F32>(const TileCall& c) {
  FloatTile<Neon, Format::MXE5M2, ScaleKind::E8M0>::run(c);
}

}  // namespace moedecode
