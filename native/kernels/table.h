// The list of kernels that every instruction set provides. Each is defined in the file named after it,
// <weights>_<activations>_<isa>.cpp, so that the folder listing is the support table.
#pragma once

#include "../kernels.h"
#include "elementwise.h"

namespace moedecode {

template <class S, Format f, ScaleKind k, ActRep r>
void tile(const TileCall&);

template <class S>
Kernels make_table() {
  using enum Format;
  using enum ScaleKind;
  Kernels t{};
  t.isa = S::kName;
  constexpr auto kFloat = ActRep::F32;
  t.tile(F32, None, kFloat) = tile<S, F32, None, kFloat>;
  t.tile(F16, None, kFloat) = tile<S, F16, None, kFloat>;
  t.tile(BF16, None, kFloat) = tile<S, BF16, None, kFloat>;
  t.tile(E4M3, None, kFloat) = tile<S, E4M3, None, kFloat>;
  t.tile(E4M3, Block128, kFloat) = tile<S, E4M3, Block128, kFloat>;
  t.tile(E5M2, None, kFloat) = tile<S, E5M2, None, kFloat>;
  t.tile(E5M2, Block128, kFloat) = tile<S, E5M2, Block128, kFloat>;
  t.tile(MXE4M3, E8M0, kFloat) = tile<S, MXE4M3, E8M0, kFloat>;
  t.tile(MXE5M2, E8M0, kFloat) = tile<S, MXE5M2, E8M0, kFloat>;
  t.tile(MXFP4, E8M0, kFloat) = tile<S, MXFP4, E8M0, kFloat>;
  t.tile(MXFP4, E8M0, ActRep::I16) = tile<S, MXFP4, E8M0, ActRep::I16>;
  t.tile(MXFP4, E8M0, ActRep::I8) = tile<S, MXFP4, E8M0, ActRep::I8>;
  t.gate_up = Elementwise<S>::gate_up;
  t.accumulate = Elementwise<S>::accumulate;
  t.quantise = Elementwise<S>::quantise;
  return t;
}

}  // namespace moedecode
