"""Independent decoders: a code's value from its bit fields (OCP MX v1.0, section 5), one code at a time."""

import math


def decode(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """A small float from its fields: sign, exponent, mantissa; no special codes."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) & 1 else 1.0
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = code & (1 << mantissa_bits) - 1
    if exponent == 0:
        return sign * math.ldexp(mantissa, 1 - bias - mantissa_bits)
    return sign * math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)


def e2m1(code: int) -> float:
    return decode(code, 2, 1, 1)


def e4m3fn(code: int) -> float:
    return math.nan if code & 0x7F == 0x7F else decode(code, 4, 3, 7)


def e5m2(code: int) -> float:
    magnitude = code & 0x7F
    if magnitude > 0x7C:
        return math.nan
    if magnitude == 0x7C:
        return -math.inf if code & 0x80 else math.inf
    return decode(code, 5, 2, 15)


def e8m0(code: int) -> float:
    return math.nan if code == 0xFF else math.ldexp(1.0, code - 127)
