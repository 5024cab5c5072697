"""What llama.cpp makes of a model at precisions that the device shows: usage: precisions.py LAMINA MODEL.gguf TEXT TOKENS FOLDER

The model's matrices become bf16, as the project's decoder takes them. A mount shows that file at each precision, and llama.cpp
judges the text with it. FOLDER gets llama.json, for `lamina reproduce --llama`, and MODEL-llama.cpp-kv.safetensors, its KV cache
of the text with the model in full.
"""

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np

# The views that are judged, the model's own bf16 first.
VIEWS = ("full", "e8m3", "e8m2", "e8m1")


def write_bf16(path, source):
    """The model of a GGUF file, its matrices as bf16."""
    reader = gguf.GGUFReader(source)
    text = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    writer = gguf.GGUFWriter(path, text.pop("general.architecture"))
    for name, value in text.items():
        types = reader.fields[name].types
        if name == "general.file_type":
            value = int(gguf.LlamaFileType.MOSTLY_BF16)
        writer.add_key_value(name, value, types[0], types[-1] if len(types) > 1 else None)
    kind = gguf.GGMLQuantizationType.BF16
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim > 1:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def shown(folder, disk, view):
    """The file of a model on the disk in a view, where a mount shows it."""
    return folder / (disk.name if view == "full" else f"{disk.stem}@{view}.gguf")


def beside(name, *words):
    """What a program beside this one prints last."""
    words = [sys.executable, Path(__file__).with_name(name), *words]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=1200)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n" + "\n".join(done.stderr.splitlines()[-10:]))
    return json.loads(done.stdout.splitlines()[-1])


def measured(model, text, tokens):
    """What llama.cpp makes of a model and of so many tokens of a text."""
    return beside("measure.py", model, text, tokens)


def say(text):
    print(f"llama.cpp: {text}", file=sys.stderr, flush=True)


def main():
    lamina, model, text, tokens, out = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5])
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "run").mkdir(mode=0o700)
        environment = dict(os.environ, XDG_RUNTIME_DIR=str(folder / "run"))
        disk, mount = folder / f"{model.stem}-bf16.gguf", folder / "m"
        cache = f"{model.stem}-llama.cpp-kv.safetensors"
        say(f"{model.name} in bf16")
        write_bf16(disk, model)

        def run(*words):
            subprocess.run([lamina, *map(str, words)], env=environment, check=True, stdout=sys.stderr)

        run("mount", disk, mount)
        try:
            models, found = mount / "models" / disk.stem, {}
            for number, view in enumerate(VIEWS, 1):
                say(f"the text with the model in {view}, {number} of {len(VIEWS)}")
                found[view] = measured(shown(models, disk, view), text, tokens)
            say("its KV cache of the text")
            beside("cache.py", shown(models, disk, "full"), text, tokens, out / cache)
        finally:
            run("umount", mount)
    report = {
        "program": f"llama.cpp (xllamacpp {version('xllamacpp')})",
        "model": model.stem,
        "text": text.name,
        "tokens": found["full"]["tokens"],
        "cache": cache,
        "perplexity": {view: of["perplexity"] for view, of in found.items()},
        "tokens_per_second": {view: of["speed"] for view, of in found.items()},
    }
    # A file that is there whole or not at all.
    part = out / "llama.json.part"
    part.write_text(json.dumps(report, indent=2) + "\n")
    part.replace(out / "llama.json")


if __name__ == "__main__":
    main()
