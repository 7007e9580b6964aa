// bfloat16 weights, float activations.
#include "simd_neon.h"
#include "table.h"
#include "tile_float.h"

namespace moedecode {

template <>
void tile<Neon, Format::BF16, ScaleKind::None, ActRep::F32>(const TileCall& c) {
  FloatTile<Neon, Format::BF16, ScaleKind::None>::run(c);
}

}  // namespace moedecode
