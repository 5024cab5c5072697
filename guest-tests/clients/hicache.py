"""A pool as SGLang's storage, against SGLang's own classes.

SGLang itself wants a GPU. The module that has its abstract class, its factory and the configuration wants PyTorch alone; the
host's pool of pages is one of this test, laid out as SGLang's is. Whoever makes the backend is SGLang's factory.
"""

import tempfile
from pathlib import Path

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.storage import StorageBackendFactory

PAGE, LAYERS, HEADS, HEAD = 64, 4, 2, 16


class HostPool:
    """Pages of K and V, all layers of a page in one piece (`page_first`) or each layer's tokens (`layer_first`)."""

    page_size = PAGE

    def __init__(self, layout, pages):
        tokens = PAGE * pages
        shape = (2, tokens, LAYERS, HEADS, HEAD) if layout == "page_first" else (2, LAYERS, tokens, HEADS, HEAD)
        self.layout, self.kv_buffer = layout, torch.zeros(shape, dtype=torch.bfloat16)

    def get_data_page(self, index, flat=True):
        page = slice(index, index + PAGE)
        data = self.kv_buffer[:, page] if self.layout == "page_first" else self.kv_buffer[:, :, page]
        return data.flatten() if flat else data

    def get_dummy_flat_data_page(self):
        return torch.zeros(2 * LAYERS * PAGE * HEADS * HEAD, dtype=torch.bfloat16)

    def set_from_flat_data_page(self, index, data):
        page = self.get_data_page(index, flat=False)
        page.copy_(data.reshape(page.shape))


class SinglePool(HostPool):
    """Of one of K and V, as MLA has it: a page lies in one piece."""

    def __init__(self, pages):
        super().__init__("page_first", pages)
        self.kv_buffer = self.kv_buffer[0].clone()

    def get_data_page(self, index, flat=True):
        data = self.kv_buffer[index : index + PAGE]
        return data.flatten() if flat else data


def config(path, **other):
    extra = {"backend_name": "lamina", "module_path": "lamina.sglang", "class_name": "HiCachePool", "path": str(path), "size": "64M"}
    wanted = {
        "tp_rank": 0, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1, "is_mla_model": False,
        "enable_storage_metrics": False, "is_page_first_layout": False, "model_name": "a/model", "extra_config": extra,
    } | other
    return HiCacheStorageConfig(**wanted)


def backend(path, host, **other):
    made = StorageBackendFactory.create_backend("dynamic", config(path, **other), host)
    assert isinstance(made, HiCacheStorage) and not made.__abstractmethods__
    made.register_mem_pool_host(host)
    return made


def check(path, host, empty):
    """All calls, with what `host` holds, and into `empty`."""
    host.kv_buffer.copy_(torch.randn(host.kv_buffer.shape).to(torch.bfloat16))
    one, other, rank = (backend(path, host), backend(path, empty), backend(path, host, tp_rank=1))
    indices, keys = torch.arange(6 * PAGE), [f"{number:064x}" for number in range(6)]
    pages = [host.get_data_page(index * PAGE) for index in range(6)]
    assert one.batch_exists(keys) == 0 and not one.exists(keys[0])
    assert one.batch_set_v1(keys[:4], indices[: 4 * PAGE]) == [True] * 4
    assert one.set(keys[4], pages[4]) and one.batch_set([keys[5], keys[0]], [pages[5], pages[1]])
    # Another process's rank has its own pages; one of the same rank has these.
    assert other.batch_exists([*keys, "none"]) == 6 and rank.batch_exists(keys) == 0
    assert other.batch_get_v1([*keys[:2], "none", *keys[3:]], indices) == [True, True, False, True, True, True]
    for index in range(6):
        wanted = torch.zeros_like(pages[0]) if index == 2 else pages[index]
        assert torch.equal(empty.get_data_page(index * PAGE), wanted), index
    # As the controller does without `interface_v1`.
    targets = [empty.get_dummy_flat_data_page()[: pages[0].numel()] for _ in range(3)]
    found = other.batch_get([keys[0], "none", keys[2]], targets)
    assert found[1] is None and torch.equal(found[0], pages[0]) and torch.equal(found[2], pages[2])
    assert found[0] is targets[0] and torch.equal(other.get(keys[5], targets[1]), pages[5])
    # What has another size is taken for absent.
    assert other.get(keys[0], torch.zeros(7)) is None
    assert one.set("large", torch.zeros(128 << 20, dtype=torch.uint8)) is False
    assert rank.set(keys[0], pages[3]) and torch.equal(other.get(keys[0], targets[0]), pages[0])
    other.clear()
    assert one.batch_exists(keys) == 0 and rank.batch_exists(keys) == 1
    for each in (one, other, rank):
        each.close()


def main():
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for layout in ("layer_first", "page_first"):
            check(folder / layout, HostPool(layout, 6), HostPool(layout, 6))
        check(folder / "mla", SinglePool(6), SinglePool(6))
        for wrong, why in ((config(folder / "x", extra_config={}), "Missing"), (config(folder / "x", should_split_heads=True), "split")):
            try:
                StorageBackendFactory.create_backend("dynamic", wrong, None)
            except ValueError as refused:
                assert why in str(refused), refused
            else:
                raise AssertionError(why)
    print("SGLang: its factory makes the backend, and pages of three layouts come back")


if __name__ == "__main__":
    main()
