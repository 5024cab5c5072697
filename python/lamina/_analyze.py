"""What a device would make of checkpoints and arrays."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import _lamina
from ._dtypes import format_of

_SAFETENSORS = {
    "fp32": "F32",
    "fp16": "F16",
    "bf16": "BF16",
    "fp8_e4m3fn": "F8_E4M3",
    "fp8_e5m2": "F8_E5M2",
    "int8": "I8",
    "opaque": "U8",
}

Path = str | os.PathLike[str]


def analyze(
    what: Path | Sequence[Path] | np.ndarray[Any, Any] | Mapping[str, np.ndarray[Any, Any]],
    *,
    codecs: Sequence[str] = ("tree", "zstd", "lz4"),
    kv: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """The report of ``lamina analyze --json``: ratios by tensor, plane and codec, the limit, and lower precisions.

    ``what`` is a checkpoint or several, an array, or arrays by name. ``kv`` says which are KV caches: those whose rows
    have that many channels, coded in windows of that many tokens.
    """
    if isinstance(what, np.ndarray):
        what = {"array": what}
    if isinstance(what, Mapping):
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            _write(file, what)
            return _report([file.name], codecs, kv)
    files = [what] if isinstance(what, (str, os.PathLike)) else list(what)
    return _report(files, codecs, kv)


def _report(files: Sequence[Path], codecs: Sequence[str], kv: tuple[int, int] | None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_lamina.analyze(files, list(codecs), kv))
    return found


def _write(file: Any, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    header: dict[str, Any] = {}
    at = 0
    for name, array in arrays.items():
        end = at + array.nbytes
        dtype = _SAFETENSORS[format_of(array.dtype)]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for array in arrays.values():
        file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    file.flush()
