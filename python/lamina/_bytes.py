"""The bytes that arrays and buffers of any kind lend."""

from __future__ import annotations

from typing import Any

import numpy as np


def bytes_of(data: Any) -> Any:
    """The bytes of an array, a tensor of PyTorch on the CPU, or a buffer of whatever elements, without a copy.

    What does not lie in one piece is refused.
    """
    apart = ValueError("the array's bytes do not follow each other: pass numpy.ascontiguousarray(array)")
    if isinstance(data, np.ndarray):
        if data.dtype.hasobject:
            raise TypeError(f"elements of dtype {data.dtype} are references, not bytes")
        if not data.flags.c_contiguous:
            raise apart
        return data.reshape(-1).view(np.uint8)
    if type(data).__module__.partition(".")[0] == "torch":
        return _bytes_of_tensor(data)
    try:
        view = memoryview(data)
    except TypeError as why:
        raise TypeError(f"{type(data).__name__} lends no bytes: pass bytes, an array or a memoryview") from why
    if not view.c_contiguous:
        raise apart
    # What is empty cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"" if view.readonly else bytearray())


def _bytes_of_tensor(tensor: Any) -> Any:
    import torch

    if tensor.device.type != "cpu":
        raise ValueError(f"the tensor is on {tensor.device}: pass tensor.cpu()")
    if not tensor.is_contiguous():
        raise ValueError("the tensor's bytes do not follow each other: pass tensor.contiguous()")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
