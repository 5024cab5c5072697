"""A pool as second tier of LMCache: its plug-in of the kind ``native_plugin``.

    {"type": "native_plugin", "module_path": "lamina.lmcache", "class_name": "Connector",
     "adapter_params": {"path": "/mnt/lamina/files/pool", "size": "64G", "dtype": "bf16", "channels": 1024}}

Processes that name the same path share the pool: what one stores, all find. The work is done by threads that want nothing of
Python. Values are evicted when space is wanted, the least recently used first, whoever stored them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import _lamina
from .pool import NODES, SIZE, Path, open_for

__all__ = ["Connector"]

Completion = tuple[int, bool, str, list[bool] | None]


class Connector:
    """The calls of LMCache's native connectors, with a pool behind them.

    ``path`` is the pool's file; with ``create`` it is made, of ``size`` bytes, if there is none. In a mount, ``dtype``
    says what the values' elements are, for example ``bf16``, and ``channels``, that they are rows of so many elements: of
    each token the heads of one layer's K or V that a rank has, times the size of a head. Then the device codes them as a
    KV cache, in windows of ``window`` tokens. LMCache tells plug-ins neither. In a pool that was made with others they are
    a class of their own.
    """

    def __init__(
        self,
        path: Path,
        *,
        size: int | str = SIZE,
        create: bool = True,
        dtype: str | None = None,
        channels: int | None = None,
        window: int = 128,
        nodes: int = NODES,
        threads: int = 2,
    ) -> None:
        kv = None if channels is None else (channels, window)
        self._pool, said = open_for(path, create=create, size=size, nodes=nodes, format=dtype, kv=kv)
        try:
            self._inner = _lamina.Connector(self._pool._inner, threads, said)
        except BaseException:
            self._pool.close()
            raise

    def event_fd(self) -> int:
        """A descriptor that polls readable when something is done that :meth:`drain_completions` has not told."""
        return self._inner.event_fd()

    def submit_batch_set(self, keys: Sequence[str], buffers: Sequence[Any]) -> int:
        """Begins to store a value a key, and gives the number under which its end is told. What a key has stays."""
        return self._inner.submit_batch_set(keys, buffers)

    def submit_batch_get(self, keys: Sequence[str], buffers: Sequence[Any]) -> int:
        """Begins to read each key's value into its buffer, which is as long as the value."""
        return self._inner.submit_batch_get(keys, buffers)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Begins to find out which keys are there."""
        return self._inner.submit_batch_exists(keys)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Begins to remove keys."""
        return self._inner.submit_batch_delete(keys)

    def drain_completions(self) -> list[Completion]:
        """What has ended: its number, whether all went well, what did not, and a result a key, none for stores.

        A key that is not there is a result, not a failure. Buffers are held until here.
        """
        return self._inner.drain_completions()

    def close(self) -> None:
        """Ends what was submitted, and leaves the pool. What was stored stays."""
        self._inner.close()
