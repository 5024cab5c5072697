"""The codec from Python by turns with the codec from Rust, on arrays of 1 MiB.

    cargo build --release --example codec_seconds --manifest-path python/Cargo.toml
    python python/bench.py python/target/release/examples/codec_seconds

The Rust program is `examples/codec_seconds.rs`; both do the same with the same bytes, one thread each. A turn is several
passes, of which the quickest counts: the first finds the other's data in the caches. A row has the median of each's
turns, and the one over the other.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time

import ml_dtypes
import numpy as np

import lamina

#: Bytes of an array.
BYTES = 1 << 20
#: Rounds of each, by turns. The first is not counted.
ROUNDS = 41
#: Passes of a turn.
PASSES = 6


def arrays():
    rng = np.random.default_rng(0)
    yield "weights, bf16", "bf16", rng.normal(0, 0.02, BYTES // 2).astype(ml_dtypes.bfloat16)
    yield "weights, fp32", "fp32", rng.normal(0, 0.02, BYTES // 4).astype(np.float32)


def rounds(program, array, name, view):
    """Seconds of each round: of Python and of Rust, to compress and to give the view."""
    found = []
    with tempfile.NamedTemporaryFile() as file:
        file.write(array.tobytes())
        file.flush()
        words = [program, file.name, name, "tree", view]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rust:
            for _ in range(ROUNDS):
                rust.stdin.write("\n" * PASSES)
                rust.stdin.flush()
                other = [[float(seconds) for seconds in rust.stdout.readline().split()] for _ in range(PASSES)]
                own = []
                for _ in range(PASSES):
                    begun = time.perf_counter()
                    coded = lamina.codec.compress(array)
                    between = time.perf_counter()
                    coded.view(view)
                    own.append((between - begun, time.perf_counter() - between))
                    # The Rust program frees it here too: both find the same memory in the caches.
                    del coded
                found.append([[min(passes) for passes in zip(*turn, strict=True)] for turn in (own, other)])
            rust.stdin.close()
    return found[1:]


def main(program):
    # One processor for both, which wait for each other by turns: another may be busier.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print("| array of 1 MiB | what | Python, ms | Rust, ms | Python over Rust |\n|---|---|---|---|---|")
    for what, name, array in arrays():
        for view in ("full", "e8m3"):
            found = rounds(program, array, name, view)
            for index, action in enumerate(("compress", f"view {view}")):
                python, rust = (statistics.median(row[who][index] for row in found) for who in (0, 1))
                print(f"| {what} | {action} | {python * 1e3:.2f} | {rust * 1e3:.2f} | {python / rust:.2f} |")


if __name__ == "__main__":
    main(sys.argv[1])
