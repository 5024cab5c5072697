"""Programs of others on a mount: what they read is held against what they read from the disk.

usage: clients.py LAMINA MODEL.safetensors TEXT CANDLE, where LAMINA has lamina-run beside it

`safetensors` opens the model as it is and at precisions, NumPy maps what has a dtype of ml_dtypes, `gguf` writes a file and
reads it again, as it is and as bf16, llama.cpp answers with SmolLM2-135M as it is published, and with one of bf16 that `gguf`
makes of that, of which a table says what each precision costs. In `files/`, DuckDB keeps a database and llama.cpp a KV cache.
PyTorch runs in a Python of its own, which LAMINA_TORCH names, and candle in the program CANDLE.
The references are a few lines of NumPy each.
"""

import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import duckdb
import gguf
import ml_dtypes
import numpy as np
import safetensors.numpy
from precisions import VIEWS, measured, shown, write_bf16
from safetensors import safe_open

BF16 = ml_dtypes.bfloat16
# Answers of a model whose speed is compared.
ROUNDS = 5


def bits(array):
    """The elements as numbers, so that NaN is equal to itself."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def same(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and bool((bits(one) == bits(other)).all())


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
    # With so many guard planes nothing of bf16 is left out: as a framework casts it, but for what
    # saturates.
    for view, dtype, most in (("fp8_e4m3fn+g4", "F8_E4M3", 448), ("fp8_e5m2+g5", "F8_E5M2", 57344)):
        for name, tensor in mapped(f"{stem}@{view}.safetensors", dtypes).items():
            wanted = np.clip(full[name].astype(np.float32), -most, most).astype(dtypes[dtype])
            assert same(tensor, wanted), (view, name)
    for name, tensor in mapped(f"{stem}@e8m3.safetensors", dtypes).items():
        assert same(tensor, truncated(full[name], 3)), name
    return len(full)


def check_torch(folder, model):
    """What PyTorch says of the model at precisions."""
    words = [os.environ["LAMINA_TORCH"], str(Path(__file__).with_name("with_torch.py")), str(model), str(folder / model.stem)]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True, timeout=600).stdout.strip()


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
        if tensor.name in ("matrix", "half"):
            assert tensor.tensor_type == gguf.GGMLQuantizationType.BF16
            shown = np.frombuffer(tensor.data.tobytes(), BF16)
            assert same(shown, was.data.ravel().astype(np.float32).astype(BF16)), tensor.name
        else:
            assert same(tensor.data, was.data), tensor.name
    return len(full)


def mapped_by_numpy(folder, path, array):
    """`numpy.load` maps a file of the mount, as it is and masked."""
    full = np.load(folder / path.name, mmap_mode="r")
    assert same(full, array)
    masked = np.load(folder / f"{path.stem}@e8m3.npy", mmap_mode="r")
    assert same(masked, (bits(array) & np.uint32(0xFFF00000)).view(np.float32))
    raw = np.memmap(folder / f"{path.stem}@e8m7.npy", np.uint16, "r")
    # The upper halves of what has seven bits are bf16.
    assert same(raw[-2 * array.size :][1::2].view(BF16), truncated_to_bf16(array))


def truncated_to_bf16(array):
    return (bits(array).ravel() >> 16).astype(np.uint16).view(BF16)


def forget(model):
    """Nothing of a file stays in the page cache, unless the page cache is where it lies."""
    with open(model, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def compare_precisions(disk, folder, text):
    """A table of a model on the disk, in a tmpfs and at the precisions that `folder` shows: cold, and warm by turns."""
    print(f"llama.cpp with {disk.name}, perplexity of 100 tokens of {text.name}, warm the median of {ROUNDS} by turns:")
    print("| file | perplexity | load s, cold | warm | tokens/s, cold | warm |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        places = {"the disk's": disk, "a tmpfs's": Path(shutil.copy(disk, memory))}
        places |= {view: shown(folder, disk, view) for view in VIEWS}
        cold, warm = {}, {name: [] for name in places}
        for name, path in places.items():
            forget(path)
            cold[name] = measured(path, text, 100)
        for _ in range(ROUNDS):
            for name, path in places.items():
                warm[name].append(measured(path, text, 0))
    for name, first in cold.items():
        seconds, speed = (statistics.median(one[what] for one in warm[name]) for what in ("seconds", "speed"))
        figures = (first["seconds"], seconds, first["speed"], speed)
        print(f"| {name} | {first['perplexity']:.3f} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |")
    perplexities = {name: first["perplexity"] for name, first in cold.items()}
    assert perplexities["full"] == perplexities["the disk's"] == perplexities["a tmpfs's"]
    assert perplexities["full"] < perplexities["e8m1"]
    return perplexities["full"]


def said(model):
    """What llama.cpp answers with a model, in a process of its own."""
    words = [sys.executable, str(Path(__file__).with_name("llama.py")), str(model)]
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=600).stdout


def check_duckdb(folder):
    """A database and a Parquet file, written, opened anew and read, each against the same in memory."""
    rows = "SELECT i AS id, hash(i) AS digest, (i * 0.37)::DOUBLE AS value, 'name ' || (i % 1000) AS name FROM range(400000) t(i)"
    sums = "SELECT count(*), sum(digest::HUGEINT), sum(id), round(sum(value), 3), count(DISTINCT name) FROM "
    path, parquet = folder / "duck.db", folder / "rows.parquet"
    with duckdb.connect(str(path)) as database:
        database.execute("CREATE TABLE rows (id BIGINT PRIMARY KEY, digest UBIGINT, value DOUBLE, name VARCHAR)")
        database.execute(f"INSERT INTO rows {rows}")
        database.execute("UPDATE rows SET value = value + 1 WHERE id % 7 = 0")
        database.execute("DELETE FROM rows WHERE id % 11 = 0")
        database.execute("CHECKPOINT")
        database.execute(f"COPY rows TO '{parquet}'")
        # This stays in the log until the database is opened again.
        database.execute("UPDATE rows SET value = value - 1 WHERE id % 7 = 0")
    wanted = duckdb.execute(f"{sums} ({rows}) WHERE id % 11 <> 0").fetchone()
    # Each block is held against its checksum as it is read.
    with duckdb.connect(str(path), read_only=True) as database:
        assert database.execute(f"{sums} rows").fetchone() == wanted
        assert database.execute("SELECT name FROM rows WHERE id = 399999").fetchone() == ("name 999",)
    written = duckdb.execute(f"{sums} '{parquet}'").fetchone()
    assert written[:3] == wanted[:3] and written[4] == wanted[4], (written, wanted)
    return wanted[0]


def check_kv(folder, model):
    """A prompt is gone on with as well from a cache that another process saved as from the beginning."""
    folder.mkdir()
    # What is made here is a KV cache; llama.cpp's is of f16.
    os.setxattr(folder, "user.lamina.format", b"fp16")
    answers = {}
    for what in ("save", "restore", "none"):
        words = [sys.executable, str(Path(__file__).with_name("kv.py")), what, str(model), str(folder)]
        out = subprocess.run(words, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=600).stdout
        answers[what] = json.loads(out.splitlines()[-1])
    assert answers["restore"]["text"] == answers["none"]["text"] == answers["save"]["text"], answers
    assert answers["restore"]["read"] < 8 < answers["none"]["read"], answers
    return os.getxattr(folder / "cache.bin", "user.lamina.ratio").decode()


def smollm():
    """SmolLM2-135M, where `./x` has put it."""
    return Path(os.environ["LAMINA_SMOLLM2"])


def check_decoder(program, folder, model, text, perplexity):
    """The project's decoder says what llama.cpp says with the same model in bf16, whose perplexity of the text is given."""
    prompt, tokens = "The capital of France is", 5
    words = [program, "--workload", "decode", "--model", "smollm2", "--on", "host", "--views", "full", "--policy", "full"]
    words += ["--prompt", prompt, "--tokens", str(tokens + 8), "--text", text, "--text-tokens", "100", "--json"]
    words = [*map(str, words), "--out", str(folder / "decoder")]
    decoded = json.loads(subprocess.run(words, check=True, stdout=subprocess.PIPE, timeout=1200).stdout)["decode"]
    answer = said(model).decode().removesuffix("\n")
    assert decoded["text"] == prompt + answer, (decoded["text"], answer)
    found = decoded["perplexity"]["full"]
    assert abs(found / perplexity - 1) < 0.01, (found, perplexity)
    print(f"the decoder writes what llama.cpp writes, and its perplexity is {found:.3f}, llama.cpp's {perplexity:.3f}")


def main():
    lamina, model, text, candle = sys.argv[1], Path(sys.argv[2]).resolve(), Path(sys.argv[3]).resolve(), sys.argv[4]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "run").mkdir(mode=0o700)
        environment = dict(os.environ, XDG_RUNTIME_DIR=str(folder / "run"))
        tiny, mount = folder / "tiny.gguf", folder / "m"
        write_gguf(tiny)

        def run(*words):
            subprocess.run([lamina, *map(str, words)], env=environment, check=True)

        large = smollm()
        array, brain = folder / "array.npy", folder / "smollm2-bf16.gguf"
        values = np.random.default_rng(2).standard_normal((100, 33)).astype(np.float32)
        np.save(array, values)
        write_bf16(brain, large)
        run("mount", model, tiny, large, array, brain, mount)
        try:
            tensors = check_safetensors(mount / "models" / model.stem, model)
            print(f"safetensors, ml_dtypes: {tensors} tensors at six precisions are right")
            print(check_torch(mount / "models", model), flush=True)
            loads = [candle, str(model), str(mount / "models" / model.stem)]
            print(subprocess.run(loads, check=True, stdout=subprocess.PIPE, text=True, timeout=600).stdout.strip(), flush=True)
            print(f"gguf: {check_gguf(mount / 'models' / 'tiny', tiny)} tensors, as they are and as bf16, are right")
            mapped_by_numpy(mount / "models" / "array", array, values)
            print("numpy.memmap with ml_dtypes: as it is and at two precisions")
            answer = said(large)
            assert answer and said(mount / "models" / large.stem / large.name) == answer
            print(f"llama.cpp: as from the disk, {answer.decode().strip()!r}", flush=True)
            print(f"DuckDB in files/: {check_duckdb(mount / 'files')} rows are right")
            ratio = check_kv(mount / "files" / "kv", large)
            print(f"llama.cpp goes on from a KV cache in files/, which is stored at {ratio}", flush=True)
            perplexity = compare_precisions(brain, mount / "models" / brain.stem, text)
            check_decoder(Path(lamina).with_name("lamina-run"), folder, brain, text, perplexity)
        finally:
            run("umount", mount)


if __name__ == "__main__":
    main()
