// FP8 weights (row, tensor or 128x128 scales), float activations.
#include "simd_neon.h"
#include "table.h"
#include "tile_float.h"

namespace moedecode {

template <>
void tile<Neon, Format::E4M3, ScaleKind::None, ActRep::F32>(const TileCall& c) {
  FloatTile<Neon, Format::E4M3, ScaleKind::None>::run(c);
}
template <>
void tile<Neon, Format::E4M3, ScaleKind::Block128, ActRep::F32>(const TileCall& c) {
  FloatTile<Neon, Format::E4M3, ScaleKind::Block128>::run(c);
}
template <>
void tile<Neon, Format::E5M2, ScaleKind::None, ActRep::F32>(const TileCall& c) {
  FloatTile<Neon, Format::E5M2, ScaleKind::None>::run(c);
}
template <>
void tile<Neon, Format::E5M2, ScaleKind::Block128, ActRep::F32>(const TileCall& c) {
  FloatTile<Neon, Format::E5M2, ScaleKind::Block128>::run(c);
}

}  // namespace moedecode
