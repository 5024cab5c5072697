"""A pool as storage of SGLang's hierarchical cache, for its backend ``dynamic``.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
    '{"backend_name": "lamina", "module_path": "lamina.sglang", "class_name": "HiCachePool",
      "path": "/mnt/lamina/files/pool", "size": "64G", "dtype": "bf16", "channels": 1024, "window": 64}'

Processes that name the same path share the pool. Pages are evicted when space is wanted, the least recently used first.
Written for SGLang 0.5.23.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from ._control import LaminaError
from .pool import NODES, SIZE, Rows, open_for

__all__ = ["HiCachePool"]

logger = logging.getLogger(__name__)


class HiCachePool(HiCacheStorage):  # type: ignore[misc]
    """Pages of the cache in a pool.

    The extra configuration has what :func:`lamina.pool.open` takes: ``path``, ``size``, ``create`` (true unless said) and
    ``nodes``; and what the pages' elements are, as in :class:`lamina.lmcache.Connector`: ``dtype``, ``channels``,
    ``window``. A page is read and stored as a whole, so its dtype and layout must be the same for all who share the pool.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        extra = dict(storage_config.extra_config or {})
        if "path" not in extra:
            raise ValueError("the extra configuration has no `path`, the file of the pool")
        if storage_config.should_split_heads:
            raise ValueError("pages whose heads are split among ranks of different numbers are not supported")
        channels = extra.get("channels")
        self.pool, said = open_for(
            extra["path"],
            create=bool(extra.get("create", True)),
            size=extra.get("size", SIZE),
            nodes=int(extra.get("nodes", NODES)),
            format=extra.get("dtype"),
            kv=None if channels is None else (int(channels), int(extra.get("window", 128))),
        )
        # Of a pool that was made with others they are a class of their own.
        self._format: str | None = None
        self._kv: Rows | None = None
        if said is not None:
            self._format, self._kv = said
        self._prefix = _identity(storage_config)

    def _name(self, key: str) -> str:
        return self._prefix + key

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """Reads a page into a tensor of the CPU, which it gives; none if the page is not there."""
        if target_location is None:
            raise ValueError("a page is read into a tensor: pass target_location")
        try:
            return target_location if self.pool.get_into(self._name(key), target_location) else None
        except (LaminaError, ValueError) as why:
            logger.warning("the page %s is taken for absent: %s", key, why)
            return None

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Reads pages into tensors, and gives one or none a key."""
        return [self.get(key, target) for key, target in zip(keys, target_locations, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Stores a page. Whether it is there then."""
        try:
            self.pool.keep(self._name(key), value.contiguous(), format=self._format, kv=self._kv)
        except (LaminaError, ValueError) as why:
            logger.warning("the page %s is not stored: %s", key, why)
            return False
        return True

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Stores pages, up to the first that cannot be. Whether all are there then."""
        return all(self.set(key, value) for key, value in zip(keys, values, strict=True))

    def exists(self, key: str) -> bool:
        """Whether a page is there."""
        try:
            return self._name(key) in self.pool
        except (LaminaError, ValueError) as why:
            logger.warning("the page %s is taken for absent: %s", key, why)
            return False

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Reads pages into the host's pool: straight into its memory if a page lies there in one piece."""
        host, found = self.mem_pool_host, []
        for key, index in zip(keys, self._firsts(keys, host_indices), strict=True):
            page = host.get_data_page(index, flat=False)
            if page.is_contiguous():
                found.append(self.get(key, page) is not None)
                continue
            page = self.get(key, host.get_dummy_flat_data_page())
            if page is not None:
                host.set_from_flat_data_page(index, page)
            found.append(page is not None)
        return found

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """Stores pages of the host's pool."""
        host = self.mem_pool_host
        return [
            self.set(key, host.get_data_page(index, flat=False))
            for key, index in zip(keys, self._firsts(keys, host_indices), strict=True)
        ]

    def _firsts(self, keys: Sequence[str], host_indices: Any) -> list[int]:
        """Where in the host's pool the pages begin."""
        first: list[int] = host_indices[:: self.mem_pool_host.page_size].tolist()
        if len(first) != len(keys):
            raise ValueError(f"{len(keys)} keys, and {len(first)} pages of the host's pool")
        return first

    def clear(self) -> None:
        """Removes all pages of this model and rank."""
        for name in self.pool:
            if name.startswith(self._prefix):
                self.pool.delete(name)

    def close(self) -> None:
        """Leaves the pool. Pages stay."""
        self.pool.close()


def _identity(config: Any) -> str:
    """What must be the same for a page to be of use: model and rank. Of MLA all ranks hold the same."""
    rank = "" if config.is_mla_model else f"tp{config.tp_rank}of{config.tp_size}"
    pipeline = f"pp{config.pp_rank}of{config.pp_size}" if config.pp_size > 1 else ""
    context = f"cp{config.attn_cp_rank}of{config.attn_cp_size}" if config.attn_cp_size > 1 else ""
    decode = ""
    if getattr(config, "dcp_size", 1) > 1:
        decode = f"dcp{config.dcp_rank}of{config.dcp_size}tp{config.tp_size}page{config.logical_page_size}"
    return "@".join(["sglang", config.model_name or "", rank + pipeline + context + decode, ""])
