"""Serving systems on a mount and its pools: engines.py LAMINA FOLDER KV.safetensors

FOLDER has LMCache, NIXL and SGLang as PyPI has them, and this Python has PyTorch. The package's own tests that want PyTorch run
first. NIXL reads and writes files of the mount. LMCache's own tools, `basic_check` and `bench l2`, run unmodified with the plug-in,
in a file of memory and in a mount, and beside LMCache's own adapters for files and for Redis. Two LMCache processes share a pool in
a mount, in which they keep a real KV cache, and the device says what that takes. SGLang's factory makes the storage backend.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: What LMCache's native module asks for by these names, which Debian gives others.
LIBRARIES = ("libc10", "libtorch", "libtorch_cpu", "libtorch_python")
#: Of LMCache's benchmark: rounds, and turns of each place besides the first.
ROUNDS, TURNS = 10, 3
#: What the cache that is stored must come to at least, with all metadata.
RATIO = 1.45


def linked(folder):
    """A folder in which those libraries are found by their names, where they are the system's."""
    folder.mkdir()
    for name in LIBRARIES:
        found = sorted(Path(sys.prefix, "lib").glob(f"*/{name}.so.*"))
        if found:
            (folder / f"{name}.so").symlink_to(found[0])
    return folder


def run(words, environment, seconds=300):
    done = subprocess.run([*map(str, words)], env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def package(environment):
    """Those tests of the package that the Python of PyPI's wheels skips."""
    said = run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", HERE.parents[1] / "python/tests", "-k", "torch"], environment)
    passed = re.search(r"^=+ (\d+) passed, \d+ deselected", said, re.MULTILINE)
    assert passed, said
    return f"the package with PyTorch: {passed[1]} tests passed"


def plug_in(path, **other):
    params = {"path": str(path), "size": "1G", **other}
    return {"type": "native_plugin", "module_path": "lamina.lmcache", "class_name": "Connector", "adapter_params": params}


def basic_check(config, environment):
    """LMCache's `basic_check`: it swallows exceptions, so its table is read."""
    words = [sys.executable, "-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter", "--kv-dtype", "bfloat16"]
    said = run([*words, "--obj-size", 65536, "--l2-adapter", json.dumps(config)], environment)
    passed = re.findall(r"\| (LOOKUP \(absent\)|STORE|LOOKUP \(exist\)|LOAD) .*?(\d+)/(\d+) ", said)
    assert len(passed) == 4 and all(good == all_of == "5" for _, good, all_of in passed), said
    assert "Validation (content): 5/5" in said, said


def bench(config, environment):
    """LMCache's `bench l2`, which verifies what it loads: MB/s stored and loaded, and keys looked up a second."""
    start = "import sys; from lmcache.cli.main import main; sys.argv[0] = 'lmcache'; sys.exit(main())"
    words = [sys.executable, "-c", start, "bench", "l2", "--no-skip-verify", "--format", "json", "--rounds", ROUNDS]
    said = run([*words, "--lookup-max-hit-rate", 1, "--l2-adapter", json.dumps(config)], environment)
    report = json.loads(said[said.index("{\n") : said.rindex("\n}") + 2])
    found = {each["operation"]: each for each in find_operations(report)}
    for each in found.values():
        assert each["total_success"] == each["total_keys"] and not each["rounds_timed_out"], said
    assert "All 32 keys data verified OK" in said, said
    return found["Store"]["throughput_avg_mbps"], found["Load"]["throughput_avg_mbps"], found["Lookup"]["ops_per_sec_avg"]


def find_operations(value):
    """The rows of a report, wherever they are in it."""
    if isinstance(value, dict):
        if "operation" in value:
            yield value
        for each in value.values():
            yield from find_operations(each)


@contextmanager
def redis(folder):
    """Redis or Valkey on a port of its own, or nothing if there is none."""
    beside = Path(sys.executable).with_name("valkey-server")
    program = shutil.which("redis-server") or shutil.which("valkey-server") or (beside if beside.exists() else None)
    if program is None:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(folder)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as server:
        try:
            for _ in range(100):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.05)
            yield {"type": "resp", "host": "127.0.0.1", "port": port}
        finally:
            server.terminate()


EMPTY = """
import sys, lamina.pool
with lamina.pool.open(sys.argv[1]) as pool:
    for name in pool:
        pool.delete(name)
"""


def emptied(config, environment):
    """Removes what the turn before stored, so that all is stored again. Redis stores in place of what is there."""
    if config["type"] == "native_plugin":
        run([sys.executable, "-c", EMPTY, config["adapter_params"]["path"]], environment)
    elif config["type"] == "fs":
        for each in Path(config["base_path"]).iterdir():
            each.unlink()


def compare(places, environment):
    """A table of LMCache's benchmark: the first turn of each place, which no byte was stored to before, and the median of others."""
    found = {name: [] for name, _ in places}
    for turn in range(1 + TURNS):
        for name, config in places:
            if turn > 0:
                emptied(config, environment)
            found[name].append(bench(config, environment))
    print("| LMCache's bench l2, 256 KiB a key | first store, MB/s | store, MB/s | load, MB/s | lookups/s |\n|---|---|---|---|---|")
    for name, (first, *turns) in found.items():
        medians = [sorted(column)[TURNS // 2] for column in zip(*turns, strict=True)]
        print(f"| {name} | " + " | ".join(f"{figure:.0f}" for figure in (first[0], *medians)) + " |")


def real_cache(mount, kv, environment):
    """Two LMCache processes keep a real KV cache in a pool that is coded as one: what it takes, all metadata counted."""
    pool = mount / "files" / "kv"
    objects = HERE / "lmcache_objects.py"
    config = json.dumps(plug_in(pool, size="16M", dtype="bf16", channels=32, window=256))
    stored = json.loads(run([sys.executable, objects, "store", config, kv], environment).splitlines()[-1])
    loaded = json.loads(run([sys.executable, objects, "load", config, kv], environment).splitlines()[-1])
    assert stored == loaded and stored["channels"] == 32
    with open(pool, "rb") as file:
        os.fsync(file.fileno())
    takes = int(os.getxattr(pool, "user.lamina.stored"))
    ratio = stored["bytes"] / takes
    assert ratio >= RATIO, (stored, takes)
    print(f"two LMCache processes share {stored['chunks']} chunks of a real KV cache: {stored['bytes']} bytes in {takes}, {ratio:.3f}")


def main():
    lamina, engines, kv = (Path(each).resolve() for each in sys.argv[1:])
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=memory) as shared:
        folder, shared = Path(folder), Path(shared)
        (folder / "run").mkdir(mode=0o700)
        paths = [HERE.parents[1] / "python", engines]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "LD_LIBRARY_PATH": str(linked(folder / "links")),
            "XDG_RUNTIME_DIR": str(folder / "run"),
            "LMCACHE_DISABLE_BANNER": "1",
            "LAMINA": str(lamina),
        }
        print(package(environment), flush=True)
        print(run([sys.executable, HERE / "hicache.py"], environment).strip(), flush=True)
        mount = folder / "m"
        run([lamina, "mount", kv, mount], environment)
        try:
            print(run([sys.executable, HERE / "nixl_posix.py", mount, kv], environment).splitlines()[-1], flush=True)
            for name, path in (("a file of memory", shared / "check"), ("a mount", mount / "files" / "check")):
                basic_check(plug_in(path), environment)
                print(f"LMCache's basic_check passes with a pool in {name}", flush=True)
            real_cache(mount, kv, environment)
            with redis(shared) as served:
                places = [
                    ("a pool in a file of memory", plug_in(shared / "pool", size="256M")),
                    ("a pool in a mount", plug_in(mount / "files" / "pool", size="256M")),
                    ("LMCache's files, in memory", {"type": "fs", "base_path": str(shared / "files")}),
                ]
                if served is None:
                    print("LMCache's Redis: skipped, there is neither redis-server nor valkey-server")
                else:
                    places.append(("LMCache's Redis", served))
                compare(places, environment)
        finally:
            run([lamina, "umount", mount], environment)


if __name__ == "__main__":
    main()
