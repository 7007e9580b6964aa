"""The packed Trainium layout, written from its index formulas and not from the package (docs/layouts.md)."""

import numpy as np

from moedecode.formats import WeightFormat

TRAINIUM_NAMES = {
    WeightFormat.MXFP4: "float4_e2m1fn_x4",
    WeightFormat.MXFP8_E4M3: "float8_e4m3fn_x4",
    WeightFormat.MXFP8_E5M2: "float8_e5m2_x4",
}


def trainium_pack(fmt, experts, hidden, intermediate, rng):
    """Random experts in the packed layout, written from its index formulas; returns (tensors, gate_up, down).

    Every element has a code, every block a scale of its own. ``gate_up [E, 2, I, H]`` and ``down [E, H, I]``
    hold what the formulas say they are worth.
    """
    bits, dtype = (4, np.uint16) if fmt is WeightFormat.MXFP4 else (8, np.uint32)
    tiles_h, tiles_i = hidden // 512, -(-intermediate // 512)
    lanes = 128 if intermediate >= 512 else 8 * -(-intermediate // 32)
    codes_gu = rng.integers(0, 1 << bits, (experts, 2, intermediate, hidden), np.uint8)
    codes_d = rng.integers(0, 1 << bits, (experts, hidden, intermediate), np.uint8)
    if bits == 8:  # no NaN or infinity codes
        codes_gu, codes_d = codes_gu & 0xFB & ~np.uint8(0x40), codes_d & 0xFB & ~np.uint8(0x40)
    scale_gu = rng.integers(120, 134, (experts, 16, 2, tiles_h, intermediate), np.uint8)
    scale_d = rng.integers(120, 134, (experts, -(-lanes // 8), tiles_i, hidden), np.uint8)
    packed_gu = np.zeros((experts, 128, 2, tiles_h, intermediate), dtype)
    packed_d = np.zeros((experts, lanes, tiles_i, hidden), dtype)
    table = np.arange(1 << bits, dtype=np.uint8).view(fmt.element).astype(np.float64)
    gate_up, down = table[codes_gu], table[codes_d]
    for h in range(hidden):
        q, t, p = h // (hidden // 4), h % (hidden // 4) // 128, h % 128
        packed_gu[:, p, :, t] |= codes_gu[:, :, :, h].astype(dtype) << dtype(bits * q)
        gate_up[:, :, :, h] *= np.exp2(scale_gu[:, p // 8, :, t] - 127.0)
    for i in range(intermediate):
        t, r = divmod(i, 512)
        used = 2 * -(-min(512, intermediate - 512 * t) // 8)
        q, p = divmod(r, used)
        packed_d[:, p, t] |= codes_d[:, :, i].astype(dtype) << dtype(bits * q)
        down[:, :, i] *= np.exp2(scale_d[:, p // 8, t] - 127.0)
    return (packed_gu, packed_d, scale_gu, scale_d), gate_up, down
