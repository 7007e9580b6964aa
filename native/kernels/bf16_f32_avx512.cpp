// bfloat16 weights, float activations.
#include "simd_avx512.h"
#include "table.h"
#include "tile_float.h"

namespace moedecode {

template <>
void tile<Avx512, Format::BF16, ScaleKind::None, ActRep::F32>(const TileCall& c) {
  FloatTile<Avx512, Format::BF16, ScaleKind::None>::run(c);
}

}  // namespace moedecode
