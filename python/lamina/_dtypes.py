"""Which NumPy dtype an element format is."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

_DTYPES: dict[str, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
    "opaque": np.dtype(np.uint8),
}
_FORMATS = {dtype: name for name, dtype in _DTYPES.items()}


def format_of(dtype: Any) -> str:
    """The format whose elements have this dtype, for example ``bf16``.

    Dtypes that the device does not know are an error; pass ``array.view(numpy.uint8)`` to keep their bytes as they are.
    """
    dtype = np.dtype(dtype)
    try:
        return _FORMATS[dtype]
    except KeyError:
        known = ", ".join(str(one) for one in _FORMATS)
        raise TypeError(
            f"no format has elements of dtype {dtype}; these are known: {known}. "
            "Convert it with .astype, or pass array.view(numpy.uint8) to keep the bytes as they are"
        ) from None


def dtype_of(format: str) -> np.dtype[Any] | None:
    """The dtype of a format's elements; none where that is not NumPy's or a byte holds two."""
    return _DTYPES.get(format)


def dtype_of_view(format: str, spelling: str, bits: int) -> np.dtype[Any]:
    """The dtype of a view's elements: the tensor's where bits are masked, another where they are converted, and bytes
    where they are packed."""
    name = spelling.split("@")[0].split("+")[0]
    converted = _DTYPES.get(name)
    if converted is not None and converted.itemsize * 8 == bits:
        return converted
    if name.startswith(("fp6_", "fp4_")):
        # Codes, in a byte each or two to a byte.
        return np.dtype(np.uint8)
    own = _DTYPES.get(format)
    if own is not None and own.itemsize * 8 == bits and not spelling.endswith(":packed"):
        return own
    return np.dtype(np.uint8)
