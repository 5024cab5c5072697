"""The codec on arrays: exact for every bit pattern, and the views against slow references."""

import ml_dtypes
import numpy as np
import pytest

import lamina
from lamina import codec

BF16 = ml_dtypes.bfloat16
DTYPES = [np.float32, np.float16, BF16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.int8, np.uint8]
SIZES = [1, 7, 2047, 2048, 2049, 10_000]


def bits_of(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def patterns(dtype, count, seed=0):
    """Random bits: NaN, infinities, denormals and negative zeros are among them."""
    size = np.dtype(dtype).itemsize
    return np.random.default_rng(seed).integers(0, 256, count * size, np.uint8).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("name", ["tree", "zstd", "lz4"])
def test_every_bit_comes_back(dtype, name):
    for count in SIZES:
        array = patterns(dtype, count)
        coded = codec.compress(array, name)
        back = coded.view()
        assert back.dtype == array.dtype and back.shape == array.shape
        assert (bits_of(back) == bits_of(array)).all()


def test_every_pattern_of_16_bits():
    for dtype in (np.float16, BF16):
        array = np.arange(1 << 16, dtype=np.uint16).view(dtype)
        assert (bits_of(codec.compress(array).view()) == bits_of(array)).all()


@pytest.mark.parametrize("mantissa", range(8))
def test_masked_views_clear_the_lower_bits(mantissa):
    array = patterns(BF16, 5000)
    mask = np.uint16(0xFFFF << (7 - mantissa) & 0xFFFF)
    expected = array.view(np.uint16) & mask
    got = codec.compress(array).view(f"e8m{mantissa}")
    assert got.dtype == BF16
    assert (got.view(np.uint16) == expected).all()


@pytest.mark.parametrize(("exponent", "guards"), [(4, 1), (4, 2), (6, 2), (7, 1)])
def test_an_exponent_is_rounded_by_its_guard_bits(exponent, guards):
    array = np.arange(1 << 16, dtype=np.uint16).view(BF16)
    codes = array.view(np.uint16).astype(np.int64)
    step = 1 << (8 - exponent)
    field = codes >> 7 & 0xFF & -(1 << (8 - exponent - guards))
    rounded = np.minimum(np.rint(field / step), 2**exponent - 1).astype(np.int64) * step
    got = codec.compress(array).view(f"e{exponent}m3+d{guards}")
    assert got.dtype == BF16
    assert (got.view(np.uint16) == (codes & 0x8070 | rounded << 7)).all()


def test_conversion_with_guard_bits_is_the_cast_of_ml_dtypes():
    # Of what e4m3fn can say: beyond it, ml_dtypes gives NaN and the device its largest number.
    array = np.random.default_rng(1).normal(0, 4, 20_000).astype(BF16)
    got = codec.compress(array).view("fp8_e4m3fn+g4")
    assert got.dtype == ml_dtypes.float8_e4m3fn
    assert (bits_of(got) == bits_of(array.astype(ml_dtypes.float8_e4m3fn))).all()


def test_a_view_fetches_less_than_all():
    array = np.random.default_rng(2).normal(0, 0.02, 1 << 16).astype(BF16)
    coded = codec.compress(array)
    assert coded.fetched("e8m1") < coded.fetched("e8m3") < coded.fetched("full") == coded.stored < coded.nbytes
    assert coded.ratio > 1.3


def test_packed_views_are_bytes():
    array = patterns(BF16, 4096)
    packed = codec.compress(array).view("e8m3:packed")
    assert packed.dtype == np.uint8 and packed.size == 4096 * 12 // 8


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32])
def test_kv_windows_come_back_and_take_less(dtype):
    rng = np.random.default_rng(3)
    channels = rng.normal(0, 4, 64)
    cache = (channels + rng.normal(0, 0.05, (300, 64)).cumsum(axis=0)).astype(dtype)
    coded = codec.compress(cache, kv=(64, 128))
    assert (bits_of(coded.view()) == bits_of(cache)).all()
    assert coded.stored < codec.compress(cache).stored
    if dtype is BF16:
        expected = cache.view(np.uint16) & np.uint16(0xFFF0)
        assert (coded.view("e8m3").view(np.uint16) == expected).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16, ml_dtypes.float8_e5m2])
def test_planes_are_the_bits_of_elements(dtype):
    array = patterns(dtype, 3000)
    width = array.itemsize * 8
    found = codec.planes(array)
    assert found.shape[0] == width
    elements = array.view(f"u{array.itemsize}")
    for plane in range(width):
        expected = np.packbits(elements >> plane & 1, bitorder="little")
        assert (found[plane, : expected.size] == expected).all()
        assert not found[plane, expected.size :].any()
    assert (bits_of(codec.from_planes(found, dtype, (3000,))) == bits_of(array)).all()


def test_planes_of_integers_come_back():
    array = np.arange(-128, 128, dtype=np.int8)
    assert (codec.from_planes(codec.planes(array), np.int8, (256,)) == array).all()
    assert (codec.from_planes(codec.planes(array), np.int8, 200) == array[:200]).all()


def test_one_size_of_a_shape_is_what_the_others_leave():
    array = patterns(BF16, 4096)
    found = codec.planes(array)
    for shape in (-1, np.int64(-1), (-1,), (-1, 64), (64, -1), (4, -1, 8)):
        back = codec.from_planes(found, BF16, shape)
        assert back.shape == array.reshape(shape).shape
        assert (bits_of(back) == bits_of(array)).all()
    # Planes are filled up to whole blocks.
    assert codec.from_planes(codec.planes(array[:3000]), BF16, (-1, 64)).shape == (64, 64)
    for shape in (-2, (-2, 64), (-2, -2), (-1, -1), (-1, 63), (-1, 0)):
        with pytest.raises(ValueError, match="shape|one unknown"):
            codec.from_planes(found, BF16, shape)


def test_keeping_the_upper_planes_masks():
    array = patterns(BF16, 2048)
    kept = codec.from_planes(codec.planes(array), BF16, (2048,), keep=12)
    assert (kept.view(np.uint16) == array.view(np.uint16) & np.uint16(0xFFF0)).all()


def test_out_is_written_and_checked():
    array = patterns(BF16, 2048)
    coded = codec.compress(array)
    out = np.zeros(2048, BF16)
    assert coded.view(out=out) is out
    assert (bits_of(out) == bits_of(array)).all()
    with pytest.raises(ValueError, match="4096 bytes, and the array 2"):
        coded.view(out=np.zeros(1, BF16))
    out.flags.writeable = False
    with pytest.raises((ValueError, BufferError), match="read-only"):
        coded.view(out=out)


def test_what_cannot_be_coded_is_named():
    with pytest.raises(TypeError, match="complex64"):
        codec.compress(np.zeros(4, np.complex64))
    with pytest.raises(ValueError, match="gzip"):
        codec.compress(np.zeros(4, np.float32), "gzip")
    with pytest.raises(ValueError, match="e9m3|no view|cannot"):
        codec.compress(np.zeros(4, BF16)).view("e9m3")
    with pytest.raises(ValueError, match="channels|window"):
        codec.compress(np.zeros(4, BF16), kv=(0, 128))
    with pytest.raises(ValueError, match="no planes"):
        codec.planes(np.zeros(4, np.uint8))


@pytest.mark.parametrize("dtype", [np.float64, np.int16, np.bool_, np.complex64, ">f4", ">f2", "U3", "O", [("a", "f4")]], ids=str)
def test_dtypes_that_no_format_has_are_named(dtype):
    array = np.zeros(4, dtype)
    for call in (codec.compress, codec.planes):
        with pytest.raises(TypeError, match="no format has elements of dtype"):
            call(array)


def test_bytes_that_end_within_an_element_are_refused():
    data = np.arange(4099, dtype=np.uint8)
    for length, name, fits in ((4099, "bf16", False), (4098, "bf16", True), (4098, "fp32", False), (4099, "int4", True)):
        for call in (lamina.codec.compress, lamina.codec.planes):
            if fits:
                call(data[:length], format=name)
                continue
            with pytest.raises(ValueError, match=f"{length} bytes are no whole number of elements of {name}"):
                call(data[:length], format=name)
    for length, name in ((4098, "bf16"), (4099, "int4"), (4099, "opaque")):
        found = lamina.codec.compress(data[:length], format=name).view()
        assert found.tobytes()[:length] == data[:length].tobytes(), name


def test_arrays_whose_bytes_do_not_follow_each_other_are_refused():
    array = np.zeros((8, 6), np.float32)
    for other in (array[:, ::2], array[::-1], array.T, np.asfortranarray(array), np.broadcast_to(array[:1], (8, 6))):
        for call in (codec.compress, codec.planes):
            with pytest.raises(ValueError, match="ascontiguousarray"):
                call(other)
        assert codec.compress(np.ascontiguousarray(other)).view().shape == other.shape
    with pytest.raises(ValueError, match="ascontiguousarray"):
        codec.compress(array).view(out=np.zeros((6, 8), np.float32).T)


def test_empty_arrays_and_zeros_take_nothing():
    empty = codec.compress(np.zeros(0, BF16))
    assert empty.stored == 0 and empty.view().size == 0
    zeros = codec.compress(np.zeros((3, 5), BF16))
    assert zeros.stored == 0 and zeros.ratio == float("inf")
    assert zeros.view().shape == (3, 5) and not zeros.view().any()


def test_analyze_tells_what_compress_does():
    array = np.random.default_rng(4).normal(0, 0.02, 1 << 16).astype(BF16)
    report = lamina.analyze(array, codecs=["tree"])
    (tensor,) = report["tensors"]
    assert tensor["logical_bytes"] == array.nbytes
    assert tensor["codecs"]["tree"]["ratio"] == pytest.approx(codec.compress(array).ratio, rel=0.02)
    with pytest.raises(ValueError, match="missing.safetensors"):
        lamina.analyze("missing.safetensors")
