"""What SGLang's threads get of a page that cannot be stored or read, without SGLang.

Its own classes call the rest: guest-tests/clients/hicache.py.
"""

import sys
import types

import numpy as np
import pytest


class Page:
    """A tensor, for what is asked of one."""

    def __init__(self, data):
        self.data = data

    def contiguous(self):
        return self.data


@pytest.fixture
def pool(tmp_path, monkeypatch):
    base = types.ModuleType("sglang.srt.mem_cache.hicache_storage")
    base.HiCacheStorage = object
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.delitem(sys.modules, "lamina.sglang", raising=False)
    from lamina.sglang import HiCachePool

    config = types.SimpleNamespace(
        extra_config={"path": tmp_path / "pool", "size": "16M"}, should_split_heads=False, is_mla_model=True,
        pp_size=1, attn_cp_size=1, model_name="a/model",
    )  # fmt: skip
    pool = HiCachePool(config)
    yield pool
    pool.close()


def test_what_cannot_be_stored_is_not_there_and_nothing_is_raised(pool):
    page, out = Page(np.arange(1000)), np.zeros(1000, np.int64)
    assert pool.set("k", page) is True and pool.exists("k") and pool.get("k", out) is out
    assert (out == page.data).all()
    long, apart = "x" * 1025, Page(np.arange(1000)[::2])
    assert pool.set(long, page) is False and pool.exists(long) is False and pool.get(long, out) is None
    assert pool.set("apart", apart) is False and pool.exists("apart") is False
    assert pool.batch_set(["k", long], [page, page]) is False
    pool.pool.close()
    assert pool.set("k", page) is False and pool.exists("k") is False and pool.get("k", out) is None
