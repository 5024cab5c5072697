"""The codec on arrays, without any device.

>>> import numpy as np, lamina.codec
>>> weights = np.linspace(-1, 1, 4096, dtype=np.float16)
>>> coded = lamina.codec.compress(weights)
>>> bool((coded.view() == weights).all())
True
>>> coded.fetched("e5m2") < coded.stored < weights.nbytes
True
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from . import _lamina
from ._bytes import bytes_of
from ._dtypes import dtype_of, dtype_of_view, format_of

__all__ = ["Compressed", "compress", "planes", "from_planes"]

#: Names of formats, and bits of an element.
FORMATS: dict[str, int] = dict(_lamina.formats())


class Compressed:
    """An array as the device would store it, in memory: made by :func:`compress`."""

    def __init__(self, inner: _lamina.Compressed, shape: tuple[int, ...]) -> None:
        self._inner = inner
        self.shape = shape

    @property
    def format(self) -> str:
        """The elements' format, for example ``bf16``."""
        return self._inner.format

    @property
    def codec(self) -> str:
        """The codec of the planes: ``tree``, ``zstd`` or ``lz4``."""
        return self._inner.codec

    @property
    def nbytes(self) -> int:
        """Bytes of the array that was coded."""
        return self._inner.nbytes

    @property
    def stored(self) -> int:
        """Bytes it takes, without the index that says where they are."""
        return self._inner.stored

    @property
    def ratio(self) -> float:
        """Bytes of the array by stored bytes; infinite for zeros, of which nothing is stored."""
        return self.nbytes / self.stored if self.stored else float("inf")

    def view(self, spelling: str = "full", out: np.ndarray[Any, Any] | None = None) -> np.ndarray[Any, Any]:
        """The array at a precision: ``full``, ``e8m3``, ``e4m3+d2``, ``e8m3+g2``, ``bf16``, ``fp8_e4m3fn`` and so on.

        Packed views come as bytes, one dimension of them. With ``out``, an array of as many bytes, nothing is allocated.
        """
        bits, _ = _lamina.view_of(self.format, spelling)
        dtype = dtype_of_view(self.format, spelling, bits)
        if out is None:
            out = np.empty(self._inner.view_bytes(spelling), np.uint8)
            self._inner.read_into(spelling, out)
            elements = self.nbytes * 8 // FORMATS[self.format]
            as_elements = dtype.itemsize * 8 == bits and elements == math.prod(self.shape)
            return out.view(dtype).reshape(self.shape) if as_elements else out.view(dtype)
        self._inner.read_into(spelling, bytes_of(out))
        return out

    def fetched(self, spelling: str = "full") -> int:
        """Stored bytes that reading the view takes."""
        out = np.empty(self._inner.view_bytes(spelling), np.uint8)
        return self._inner.read_into(spelling, out)

    def scale_exp(self, spelling: str) -> int:
        """S, where a value x of the view stands for x times two to the power of S."""
        return _lamina.view_of(self.format, spelling)[1]

    def __repr__(self) -> str:
        return f"<Compressed {self.format} {self.shape}: {self.nbytes} bytes in {self.stored}, {self.codec}>"


def compress(
    array: np.ndarray[Any, Any],
    codec: str = "tree",
    *,
    kv: tuple[int, int] | None = None,
    format: str | None = None,
) -> Compressed:
    """Codes an array as the device would store it.

    ``kv`` says that it is a KV cache: channels of a token's row, and tokens of a window. ``format`` is for what has no
    dtype, for example ``int4`` for bytes that hold two elements each.
    """
    array = np.asarray(array)
    name = format or format_of(array.dtype)
    return Compressed(_lamina.compress(bytes_of(array), name, codec, kv), array.shape)


def planes(array: np.ndarray[Any, Any], *, format: str | None = None) -> np.ndarray[Any, Any]:
    """The bit-planes of an array: row i has bit i of every element, eight elements a byte.

    Rows are filled up to whole blocks of 4 KiB with zeros. Integers have their sign folded, as the device stores them.
    """
    array = np.asarray(array)
    name = format or format_of(array.dtype)
    data = bytes_of(array)
    out = np.empty((FORMATS[name], -(-data.size // 4096) * 4096 // FORMATS[name]), np.uint8)
    _lamina.split_planes(data, name, out.reshape(-1))
    return out


def from_planes(
    planes: np.ndarray[Any, Any], dtype: Any, shape: tuple[int, ...] | int = -1, *, keep: int | None = None
) -> np.ndarray[Any, Any]:
    """The array that :func:`planes` was made of; with ``keep``, from that many of the most significant planes only.

    One size of the shape may be -1, as for ``reshape``: then it has all elements that the planes hold, and so the zeros
    that they were filled up with.
    """
    name = format_of(dtype)
    own = dtype_of(name)
    assert own is not None
    planes = np.ascontiguousarray(planes, np.uint8)
    if planes.ndim != 2 or len(planes) != FORMATS[name]:
        raise ValueError(f"{name} has {FORMATS[name]} planes, and the array the shape {planes.shape}")
    if keep is not None:
        if not 0 <= keep <= len(planes):
            raise ValueError(f"keep is {keep}, and there are {len(planes)} planes")
        planes = planes.copy()
        planes[: len(planes) - keep] = 0
    out = np.empty(planes.size, np.uint8)
    _lamina.join_planes(planes.reshape(-1), name, out)
    whole = out.view(own)
    sizes = tuple(shape) if isinstance(shape, (tuple, list)) else (operator.index(shape),)
    if min(sizes, default=0) < -1:
        raise ValueError(f"the shape {shape} has a negative size; one may be -1, which stands for what the others leave")
    if -1 in sizes:
        return whole.reshape(sizes)
    wanted = math.prod(sizes)
    if wanted > whole.size:
        raise ValueError(f"the planes hold {whole.size} elements, and the shape {shape} asks for {wanted}")
    return whole[:wanted].reshape(sizes)
