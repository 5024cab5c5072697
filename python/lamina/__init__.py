"""Tensors as compressed bit-planes: a Lamina device as NumPy arrays.

>>> import lamina, numpy as np                                    # doctest: +SKIP
>>> with lamina.mount("model.safetensors") as device:             # doctest: +SKIP
...     weights = device["model/layers.0.wq"]
...     weights.array()            # the bytes themselves, no copy
...     weights.array("e8m3")      # the same at a lower precision: fewer stored bytes are fetched

:func:`mount` starts a device, :func:`open` finds one: by the directory that it is mounted on, or, in a guest, by its
memory. :mod:`lamina.codec` codes arrays without a device; :func:`analyze` says what a device would make of them.
:mod:`lamina.pool` shares objects and blocks of KV caches among processes.
"""

from __future__ import annotations

from . import codec, pool
from ._analyze import analyze
from ._control import LaminaError
from ._device import Device, Tensor, mount, open

__all__ = ["Device", "LaminaError", "Tensor", "analyze", "codec", "mount", "open", "pool"]
