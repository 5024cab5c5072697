"""What LMCache keeps of a real KV cache, by its own adapter: lmcache_objects.py store|load CONFIG KV.safetensors

`store` has LMCache store a cache's chunks of 256 tokens, laid out as it lays them out, `load` has it find and load them in
another process, and holds each byte against the file. Both print JSON.
"""

import argparse
import json
import select
import sys

import numpy as np
import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

CHUNK = 256
SECONDS = 60


def chunks(path):
    """Each chunk's elements as bits: K and V, layers, tokens, channels."""
    data = np.fromfile(path, np.uint8)
    start = 8 + int(data[:8].view("<u8")[0])
    header = json.loads(data[8:start].tobytes())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        _, layer, _, sequence, kind = name.split(".")
        bits = data[start + begin : start + end].view(np.uint16).reshape(entry["shape"])
        tensors[int(sequence), "kv".index(kind), int(layer)] = bits
    layers = 1 + max(layer for _, _, layer in tensors)
    for sequence in sorted({sequence for sequence, _, _ in tensors}):
        whole = np.stack([[tensors[sequence, kind, layer] for layer in range(layers)] for kind in range(2)])
        for first in range(0, whole.shape[2] - CHUNK + 1, CHUNK):
            yield sequence, first, np.ascontiguousarray(whole[:, :, first : first + CHUNK])


def memory_object(bits):
    """As LMCache has it in its first tier."""
    tensor = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    metadata = MemoryObjMetadata(
        shape=tensor.shape, dtype=tensor.dtype, address=tensor.data_ptr(), phy_size=bits.nbytes, fmt=MemoryFormat.KV_2LTD, ref_count=1
    )
    return TensorMemoryObj(tensor.view(-1), metadata, parent_allocator=None)


def ended(descriptor, result):
    """What comes of something, once its descriptor says that it ended."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    for _ in range(SECONDS):
        if poll.poll(1000):
            consume_fd(descriptor)
        found = result()
        if found is not None:
            return found
    raise TimeoutError(f"nothing within {SECONDS} s")


def main():
    what, config, path = sys.argv[1:]
    parsed = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[config]))
    adapter = create_l2_adapter(parsed.adapters[0])
    try:
        all_chunks = list(chunks(path))
        keys = [
            ObjectKey(chunk_hash=ObjectKey.IntHash2Bytes(sequence << 16 | first), model_name="stories260K", kv_rank=0)
            for sequence, first, _ in all_chunks
        ]
        stored = [bits for _, _, bits in all_chunks]
        if what == "store":
            adapter.submit_store_task(keys, [memory_object(bits) for bits in stored])
            (result,) = ended(adapter.get_store_event_fd(), lambda: adapter.pop_completed_store_tasks() or None).values()
            assert result.is_successful(), result
        else:
            absent = ObjectKey(chunk_hash=ObjectKey.IntHash2Bytes(1 << 31), model_name="stories260K", kv_rank=0)
            task = adapter.submit_lookup_and_lock_task([*keys, absent], {})
            found = ended(adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task))
            assert [found.test(index) for index in range(len(keys) + 1)] == [True] * len(keys) + [False]
            loaded = [np.zeros_like(bits) for bits in stored]
            task = adapter.submit_load_task(keys, [memory_object(bits) for bits in loaded])
            found = ended(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
            assert all(found.test(index) for index in range(len(keys)))
            assert all((one == other).all() for one, other in zip(stored, loaded, strict=True))
            adapter.submit_unlock(keys)
    finally:
        adapter.close()
    channels = stored[0].shape[-1]
    print(json.dumps({"chunks": len(keys), "bytes": sum(bits.nbytes for bits in stored), "channels": channels}))


if __name__ == "__main__":
    main()
