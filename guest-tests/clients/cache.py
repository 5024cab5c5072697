"""llama.cpp's KV cache of a text, as tensors: usage: cache.py MODEL.gguf TEXT TOKENS OUT.safetensors

K and V of each layer, tokens by channels in bf16, under the names of the bundled cache. K is after RoPE.
"""

import struct
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors.numpy
import server
import xllamacpp

BF16 = int(xllamacpp.ggml_type.GGML_TYPE_BF16)
# A sequence's file: "ggsq" as a number, and the version of it that is read here.
MAGIC, VERSION = 0x67677371, 4


class State:
    """The file of a saved slot, read from its beginning on."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def numbers(self, form):
        numbers = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return numbers

    def expect(self, form, *wanted):
        """What is laid out otherwise is refused, and not taken for numbers of a cache."""
        found = self.numbers(form)
        if found != wanted:
            raise SystemExit(f"llama.cpp's cache has {found} where {wanted} is known, before byte {self.at}")

    def rows(self, tokens):
        kind, row = self.numbers("iQ")
        if kind != BF16 or row == 0 or row % 2 or self.at + tokens * row > len(self.data):
            raise SystemExit(f"llama.cpp's cache has rows of {row} bytes of type {kind} before byte {self.at}")
        rows = np.frombuffer(self.data, ml_dtypes.bfloat16, tokens * row // 2, self.at)
        self.at += tokens * row
        return rows.reshape(tokens, row // 2)


def tensors(data, tokens):
    """K and V by layer of a saved slot that holds so many tokens in a stream of its own."""
    state = State(data)
    state.expect("II", MAGIC, VERSION)
    (listed,) = state.numbers("I")
    state.at += 4 * listed
    state.expect("II", 1, tokens)
    for position in range(tokens):
        state.expect("iII", position, 1, 0)
    (transposed, layers) = state.numbers("II")
    # Two words that this version writes; other values than 0 were not seen.
    state.expect("II", 0, 0)
    if transposed:
        raise SystemExit("llama.cpp's cache has V by channels: it was made without flash attention")
    found = {f"layers.{layer}.seq.0.{side}": state.rows(tokens) for side in "kv" for layer in range(layers)}
    if state.at != len(data):
        raise SystemExit(f"llama.cpp's cache has {len(data) - state.at} bytes behind its last layer")
    return found


def main():
    model, text, count, out = sys.argv[1], open(sys.argv[2]).read(), int(sys.argv[3]), sys.argv[4]
    params = server.parameters(model, 512, server.processors())
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_BF16
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.endpoint_slots = True
    with tempfile.TemporaryDirectory() as folder:
        params.slot_save_path = folder + "/"
        llama = xllamacpp.Server(params)
        tokens = server.post(llama, "/tokenize", {"content": text})["tokens"][:count]
        server.post(llama, "/completion", {"prompt": tokens, "n_predict": 0, "cache_prompt": True, "id_slot": 0})
        server.post(llama, "/slots/0?action=save", {"filename": "cache.bin"})
        found = tensors((Path(folder) / "cache.bin").read_bytes(), len(tokens))
    safetensors.numpy.save_file(found, out)
    server.end(len(tokens))


main()
