// The narrow interface between the orchestration and the instruction sets.
//
// One table of functions per ISA; the best one this CPU has is chosen when the library loads, or the one that the
// environment variable MOEDECODE_ISA names. All tables read the same packed layout.
#pragma once

#include <string>
#include <vector>

#include "formats.h"

namespace moedecode {

// One 16-row tile times the activation rows of `tokens` tokens: out[token][16] = tile @ row.
struct TileCall {
  const std::uint8_t* tile;
  const float* row_scale;  // [16] or null; multiplies the finished sums (NaN marks a row with a NaN weight)
  int blocks;
  const unsigned char* const* rows;  // activation rows, all in the representation of the kernel; BF16Pair: equally far apart
  int tokens;
  float* out;  // [tokens][16], cache-line aligned
  const std::uint8_t* next = nullptr;  // the tile wanted after this one, where that is not its neighbour in memory
};
using TileKernel = void (*)(const TileCall&);

enum class Activation : std::uint8_t { SiLU, Swish, GELU, GELUTanh, ReLU2, ReLU };

// The epilogue of gate and up: h = act(clamp(gate + bias)) * (clamp(up + bias) + offset).
struct GateUpEpilogue {
  Activation activation;
  float alpha, up_offset, gate_lower, gate_upper, up_lower, up_upper;
};

struct Kernels {
  const char* isa;
  TileKernel tiles[8][3][4];  // [Format][ScaleKind][ActRep]; null where the pairing does not exist

  // gate and up are [tokens][16] sums of one tile; biases [16] or null; h[token] points at 16 floats.
  void (*gate_up)(const GateUpEpilogue&, const float* gate, const float* up, const float* gate_bias,
                  const float* up_bias, int tokens, float* const* h);
  // acc[0..16) += weight * (y[0..16) + bias[0..16)); bias may be null.
  void (*accumulate)(float* acc, const float* y, const float* bias, float weight);
  // One block of 32 floats, times `factor`, into block b of an activation row.
  void (*quantise)(Precision, ActRep, const float* block, float factor, unsigned char* row, int b, int blocks);

  TileKernel& tile(Format f, ScaleKind k, ActRep r) { return tiles[static_cast<int>(f)][static_cast<int>(k)][static_cast<int>(r)]; }
  TileKernel tile(Format f, ScaleKind k, ActRep r) const { return const_cast<Kernels*>(this)->tile(f, k, r); }
};

// How activations are held for weights of format `f`. Integer activations need integer weights; pairs of bfloat16 a table
// that multiplies them; everything else multiplies floats.
inline ActRep act_rep(const Kernels& k, Format f, Precision p) {
  if (p == Precision::MXFP8) return ActRep::F32;
  if (k.tile(f, ScaleKind::None, ActRep::BF16Pair)) return ActRep::BF16Pair;
  if (f != Format::MXFP4) return ActRep::F32;
  return p == Precision::A16 ? ActRep::I16 : ActRep::I8;
}

std::vector<std::string> available_isas();
const Kernels& kernels();               // the table in use
void use_isa(const std::string& name);  // throws std::invalid_argument for a name this CPU lacks

// One definition per instruction set, in kernels/.
const Kernels& portable_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
#if defined(MOEDECODE_AMX)
const Kernels& amx_kernels();
bool amx_permitted();  // asks the system for the tile registers, once
#endif
#elif defined(__aarch64__)
const Kernels& neon_kernels();
#endif

}  // namespace moedecode
