#!/usr/bin/env python3
"""Writes golden/views.tsv: what numpy and ml_dtypes make of every view.

    python3 -m venv VENV && VENV/bin/pip install -r requirements.txt && VENV/bin/python make.py

A row is: format, elements, spelling, bytes, SHA-256 of the view's bytes. A row whose spelling is `full` fixes the
input itself. The input is the format's whole enumeration, or, if `elements` is less, so many of it from a
third of its length (rounded down) on. The enumerations:

* formats of 16 bits and fewer: every code, rising from 0;
* fp32: for each sign and exponent field (rising from 0 to 511) each mantissa of MANTISSAS in its order, then
  NOISE numbers of the generator x := (1664525 x + 1013904223) mod 2^32 from x = 1.

Where it can, a view is computed from values (a cast by ml_dtypes, rounding by np.rint), not by fiddling with bits.
"""

import hashlib
import pathlib

import ml_dtypes
import numpy as np

np.seterr(all="ignore")

# name: (container, float type, exponent bits, mantissa bits)
FLOATS = {
    "fp32": (np.uint32, np.float32, 8, 23),
    "fp16": (np.uint16, np.float16, 5, 10),
    "bf16": (np.uint16, ml_dtypes.bfloat16, 8, 7),
    "fp8_e4m3fn": (np.uint8, ml_dtypes.float8_e4m3fn, 4, 3),
    "fp8_e5m2": (np.uint8, ml_dtypes.float8_e5m2, 5, 2),
}

# Each power of two with both neighbours: all ties, almost-ties and single planes at every place.
MANTISSAS = sorted({(m + d) % (1 << 23) for k in range(24) for m in (1 << k, 3 << k) for d in (-1, 0, 1)})
NOISE = 20000


def inputs(name):
    """The input enumeration of a format, as numbers of its container."""
    if name != "fp32":
        bits = np.dtype(FLOATS[name][0]).itemsize * 8 if name in FLOATS else {"int8": 8, "opaque": 8, "int4": 4}[name]
        return np.arange(1 << bits, dtype=np.uint16 if bits == 16 else np.uint8)
    out = [(top << 23) | m for top in range(512) for m in MANTISSAS]
    x = 1
    for _ in range(NOISE):
        x = (1664525 * x + 1013904223) % (1 << 32)
        out.append(x)
    return np.array(out, dtype=np.uint32)


def fields(name):
    container, _, e, m = FLOATS[name]
    total = 1 + e + m
    sign = 1 << (total - 1)
    exponent = ((1 << e) - 1) << m
    return container, e, m, sign, exponent


def top_mantissa(m, y):
    return ((1 << m) - 1) - ((1 << (m - y)) - 1)


def truncated(name, codes, x, y):
    container, e, m, sign, _ = fields(name)
    exponent = (((1 << e) - 1) - ((1 << (e - x)) - 1)) << m
    return codes & container(sign | exponent | top_mantissa(m, y))


def rounded(name, codes, y, g):
    """By value: divide by the step at y bits, np.rint (ties to even), multiply, cast back to the format."""
    container, e, m, sign, exponent = fields(name)
    dtype = FLOATS[name][1]
    cut = truncated(name, codes, e, y)
    keep = (codes & container(exponent)) == container(exponent)
    v = truncated(name, codes, e, min(y + g, m)).view(dtype).astype(np.float64)
    bias = (1 << (e - 1)) - 1
    _, power = np.frexp(np.where(keep, 1.0, v))
    power = np.maximum(power - 1, 1 - bias)  # v = f * 2^power with 1 <= |f| < 2, or |f| < 1 if subnormal
    step = np.ldexp(1.0, power - y)
    ratio = np.where(keep, 0.0, v) / step
    whole = np.rint(ratio)
    if y == 0:
        # No mantissa bit is kept, so a tie goes to the even exponent field, not to the even
        # multiple.
        tie = (np.abs(ratio) % 1) == 0.5
        lower_field = (codes & container(exponent)) >> container(m)
        lower = np.copysign(np.floor(np.abs(ratio)), ratio)
        whole = np.where(tie, np.where(lower_field % 2 == 0, lower, lower + np.copysign(1.0, ratio)), whole)
    value = whole * step
    value = np.where(np.signbit(v), -np.abs(value), value)
    # A carry past the largest finite value must come out as infinity; for e4m3fn it cannot happen.
    out = value.astype(np.float32).astype(dtype).view(container)
    return np.where(keep, cut, out).astype(container)


def rounded_exponent(name, codes, x, d):
    """The exponent's field, of which x + d bits count, in steps of its x bits; the other bits as they are."""
    container, e, m, _, exponent = fields(name)
    fetched = truncated(name, codes, min(x + d, e), m) & container(exponent)
    step = 2.0 ** (e - x + m)
    field = np.minimum(np.rint(fetched / step), 2**x - 1) * step
    return (codes & ~container(exponent)) | field.astype(container)


def rounded_by_cast(name, codes, target):
    """All guards, by ml_dtypes alone: valid where the target has the source's exponent."""
    container, e, m, _, exponent = fields(name)
    dtype, to = FLOATS[name][1], FLOATS[target][1]
    keep = (codes & container(exponent)) == container(exponent)
    out = codes.view(dtype).astype(to).astype(dtype).view(container)
    return np.where(keep, truncated(name, codes, e, FLOATS[target][3]), out).astype(container)


def converted(name, codes, target, g, s):
    _, e, m, _, _ = fields(name)
    mt, to = FLOATS[target][3], FLOATS[target][1]
    # Single precision holds every quotient of a source exactly, but for those so small or so large
    # that they become 0 or saturate anyway.
    t = truncated(name, codes, e, min(mt + g, m)).view(FLOATS[name][1]).astype(np.float32)
    limit = np.float32(ml_dtypes.finfo(to).max)
    return np.clip(t / np.float32(2.0**s), -limit, limit).astype(to).view(FLOATS[target][0])


def packed(name, codes, x, y):
    """The kept bits of each element, lowest first, as one stream."""
    _, e, m, _, _ = fields(name)
    bits = np.unpackbits(codes.view(np.uint8).reshape(len(codes), codes.itemsize), axis=1, bitorder="little")
    kept = list(range(m - y, m)) + list(range(m + e - x, m + e)) + [m + e]
    return np.packbits(bits[:, kept].ravel(), bitorder="little").tobytes()


def nibbles(x):
    x = np.append(x, np.zeros(len(x) % 2, np.uint8))
    return (x[0::2] | (x[1::2] << 4)).astype(np.uint8).tobytes()


def pairs(x):
    x = np.append(x, np.zeros(-len(x) % 4, np.uint8))
    return (x[0::4] | x[1::4] << 2 | x[2::4] << 4 | x[3::4] << 6).astype(np.uint8).tobytes()


def float_views(name, codes, small):
    """(spelling, bytes) of every view; of fp32 only some exponents, mantissas and guards are taken."""
    _, e, m, _, _ = fields(name)
    yield "full", codes.tobytes()
    wide = name == "fp32"
    for x in ([0, 1, 5, 8] if wide else range(e + 1)):
        for y in ([0, 1, 3, 7, 10, 22, 23] if wide else range(m + 1)):
            cut = truncated(name, codes, x, y)
            yield f"e{x}m{y}", cut.tobytes()
            yield f"e{x}m{y}:packed", packed(name, cut, x, y)
    for y in ([0, 1, 3, 7, 10, 22, 23] if wide else range(m + 1)):
        for g in ([1, 2, 5, 23] if wide else sorted({1, 2, 3, m - y, m + 5} - {0})):
            near = rounded(name, codes, y, g)
            yield f"e{e}m{y}+g{g}", near.tobytes()
            yield f"e{e}m{y}+g{g}:packed", packed(name, near, e, y)
    for x in ([1, 5, 6] if wide else range(e)):
        for d in (1, 2):
            y = m // 2
            if x + d <= e:
                cut = rounded_exponent(name, truncated(name, codes, e, y), x, d)
                yield f"e{x}m{y}+d{d}", cut.tobytes()
            if x + d == e:
                near = rounded_exponent(name, rounded(name, codes, y, 2), x, d)
                yield f"e{x}m{y}+d{d}+g2:packed", packed(name, near, x, y)
    if (name, small) == ("fp32", False):
        assert rounded("fp32", codes, 7, 23).tobytes() == rounded_by_cast("fp32", codes, "bf16").tobytes()
    if (name, small) == ("fp16", False):
        assert rounded("fp16", codes, 2, 10).tobytes() == rounded_by_cast("fp16", codes, "fp8_e5m2").tobytes()
    targets = {"fp32": ["bf16", "fp8_e4m3fn", "fp8_e5m2"]}.get(name, ["fp8_e4m3fn", "fp8_e5m2"])
    if not name.startswith("fp8"):
        for target in targets:
            scales = [0] if target == "bf16" else [0, 1, -1, 5, -7, 64, -64]
            for s in scales:
                scale = f"@{s}" if s else ""
                yield f"{target}{scale}", converted(name, codes, target, 2, s).tobytes()
                for g in [0, 1, 4, 23]:
                    yield f"{target}+g{g}{scale}", converted(name, codes, target, g, s).tobytes()


def integer_views(name, codes):
    if name == "int4":
        yield "full", nibbles(codes)
        return
    yield "full", codes.tobytes()
    if name == "int8":
        shifted = codes.view(np.int8)
        yield "int4", nibbles((shifted >> 4).view(np.uint8) & 15)
        yield "int2", pairs((shifted >> 6).view(np.uint8) & 3)


def main():
    rows = []
    for name in ["fp32", "fp16", "bf16", "fp8_e4m3fn", "fp8_e5m2", "int8", "int4", "opaque"]:
        everything = inputs(name)
        for count in sorted({len(everything), 0, 1, 7, 11}):
            small = count < min(100, len(everything))
            third = len(everything) // 3
            codes = everything[third : third + count] if small else everything
            views = float_views(name, codes, small) if name in FLOATS else integer_views(name, codes)
            for spelling, data in views:
                # Short tails matter for the packing alone: a few spellings do.
                if small and name in FLOATS and spelling not in (
                    "full", "e2m1", "e2m1:packed", "e3m2:packed", "e1m0:packed", "fp8_e4m3fn"
                ):
                    continue
                rows.append(f"{name}\t{count}\t{spelling}\t{len(data)}\t{hashlib.sha256(data).hexdigest()}\n")
    out = pathlib.Path(__file__).with_name("views.tsv")
    out.write_text("".join(rows))
    print(f"{len(rows)} rows, {out.stat().st_size} bytes, numpy {np.__version__}, ml_dtypes {ml_dtypes.__version__}")


if __name__ == "__main__":
    main()
