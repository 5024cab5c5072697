"""Pools: objects and blocks of any bytes, shared by processes that are killed, and contents that are no pool."""

import array
import json
import mmap
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import lamina
from lamina.pool import PoolFull, create, keys, open_for
from lamina.pool import open as open_pool

DTYPES = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8, np.bool_, np.complex64, ">f4"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pool"


@pytest.fixture
def pool(path):
    with create(path, size="32M") as pool:
        yield pool


def noise(count, seed=0):
    return np.random.default_rng(seed).integers(0, 256, count, np.uint8)


def run(script, *arguments, **options):
    """A script in a Python of its own."""
    words = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False, **options)


def started(script, *arguments):
    return subprocess.Popen([sys.executable, "-c", script, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def holds(pool):
    """All of the pool's invariants."""
    found = pool.check()
    assert found["problems"] == [], found
    return found


def test_objects_are_put_got_replaced_listed_and_deleted(pool):
    assert pool.get("a") is None and pool.length("a") is None and "a" not in pool
    for name, length in [("a", 5), ("b", 0), ("c", 70_001), ("ü" * 500, 1 << 20)]:
        data = noise(length).tobytes()
        pool.put(name, data)
        assert pool.get(name) == data and pool.length(name) == length and name in pool
    pool.put("a", b"another")
    assert pool.get("a") == b"another"
    assert [(found.name, found.nbytes) for found in pool.list()] == [("a", 7), ("b", 0), ("c", 70_001), ("ü" * 500, 1 << 20)]
    assert list(pool) == ["a", "b", "c", "ü" * 500]
    assert pool.delete("c") and not pool.delete("c") and pool.get("c") is None
    assert pool.stat()["objects"] == 3 and pool.stat()["nodes"] == 1
    assert holds(pool)["ready"] == 3
    for name, why in (("", "a name has no bytes"), ("x" * 1025, "a name has 1025 bytes, more than 1024")):
        with pytest.raises(ValueError, match=why):
            pool.put(name, b"")


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_arrays_of_any_dtype_come_back_without_a_copy(pool, dtype):
    data = noise(16 * 1000).view(dtype).reshape(-1, 50) if dtype is not np.bool_ else np.eye(100, dtype=np.bool_)
    pool.put("array", data)
    assert pool.get("array") == data.tobytes()
    out = np.zeros_like(data)
    assert pool.get_into("array", out)
    assert out.tobytes() == data.tobytes()
    assert not pool.get_into("nothing", out) and out.tobytes() == data.tobytes()


def test_other_buffers_come_back(pool):
    data = noise(4096).tobytes()
    with mmap.mmap(-1, 4096) as mapped:
        buffers = [bytearray(4096), array.array("d", bytes(4096)), memoryview(bytearray(4096))[:], mapped]
        for buffer in buffers:
            pool.put("b", data)
            assert pool.get_into("b", buffer)
            assert bytes(memoryview(buffer).cast("B")) == data
            pool.put("again", buffer)
            assert pool.get("again") == data
        # Nothing of it is held afterwards.
        buffers.clear()
        del buffer
    structured = np.zeros(10, [("a", "f4"), ("b", "u1")])
    pool.put("structured", structured)
    assert pool.length("structured") == structured.nbytes


def test_what_cannot_be_taken_is_said(pool):
    pool.put("a", bytes(100))
    apart = np.zeros((10, 10), np.float32)
    for other in (apart[:, ::2], apart[::-1], apart.T, memoryview(bytearray(20))[::2]):
        for call in (lambda data: pool.put("b", data), lambda data: pool.get_into("a", data), lambda data: pool.store(bytes(16), [data])):
            with pytest.raises(ValueError, match="do not follow each other"):
                call(other)
    assert "b" not in pool
    for length in (99, 101, 0):
        out = bytearray(length)
        with pytest.raises(ValueError, match=f"100 bytes are stored, and the buffer has {length}"):
            pool.get_into("a", out)
        assert out == bytes(length)
    with pytest.raises(ValueError, match="read-only"):
        pool.get_into("a", bytes(100))
    frozen = np.zeros(100, np.uint8)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        pool.get_into("a", frozen)
    for nothing in ("text", 5, None, np.array([object()])):
        with pytest.raises(TypeError, match="lends no bytes|references"):
            pool.put("b", nothing)
    with pytest.raises(ValueError, match="a key has 16 bytes, and this has 3"):
        pool.read(b"abc")


def test_a_fifo_is_refused_and_not_waited_for(path):
    os.mkfifo(path)
    script = """
import sys, lamina.pool
for call in (lamina.pool.create, lamina.pool.open, lambda path: lamina.pool.create(path, size="1M", force=True)):
    try:
        call(sys.argv[1])
    except OSError as why:
        print(why)
"""
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=20, check=True)
    assert len(done.stdout.splitlines()) == 3, done


def test_keys_say_all_tokens_up_to_a_blocks_end():
    tokens = random.Random(1).choices(range(1 << 32), k=100)
    whole = keys("a", tokens)
    assert len(whole) == 6 and len(set(whole)) == 6 and all(len(key) == 16 for key in whole)
    assert keys("a", np.array(tokens[:40], np.uint32)) == whole[:2] == keys("a", np.array(tokens[:47], np.int64))
    assert keys("b", tokens)[0] != whole[0]
    assert keys("a", [*tokens[:20], 7, *tokens[21:]])[:2] == [whole[0], keys("a", [*tokens[:20], 7, *tokens[21:32]])[1]]
    assert keys("a", [*tokens[:20], 7, *tokens[21:]])[2] != whole[2]
    assert keys("a", []) == [] == keys("a", tokens[:15])
    assert keys("a", tokens, block=100) != [] == keys("a", tokens, block=101) == keys("a", tokens, block=1 << 62)
    for bad in ([-1], [1 << 32], [1.5], [[1]]):
        with pytest.raises(ValueError, match="tokens are"):
            keys("a", bad)
    with pytest.raises(ValueError, match="at least one token"):
        keys("a", tokens, block=0)


def test_blocks_are_gathered_stored_once_and_scattered(pool):
    (first, second, third), layers = keys("model", range(48)), 4
    pieces = [noise(16 * 8 * 2, seed).view(ml_dtypes.bfloat16).reshape(16, 8) for seed in range(2 * layers)]
    assert pool.store(first, pieces)
    assert not pool.store(first, [b"something else"])
    assert pool.prefix([first, second, third]) == 1
    assert pool.store(third, [b"x"]) and pool.prefix([first, second, third]) == 1
    assert pool.store(second, [b"", b"y", bytearray()]) and pool.prefix([first, second, third]) == 3
    out = [np.zeros_like(piece) for piece in pieces]
    assert pool.read_into(first, out)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(out, pieces, strict=True))
    # Other pieces of as many bytes, also empty ones and of an odd number.
    whole = b"".join(piece.tobytes() for piece in pieces)
    other = [bytearray(1), bytearray(0), bytearray(len(whole) - 8), bytearray(7), bytearray(0)]
    assert pool.read_into(first, other) and b"".join(other) == whole == pool.read(first)
    with pytest.raises(ValueError, match="2048 bytes are stored, and the buffer has 2047"):
        pool.read_into(first, [bytearray(2047)])
    assert pool.remove(second) and not pool.remove(second) and not pool.read_into(second, [bytearray(1)])
    assert pool.prefix([first, second, third]) == 1
    assert holds(pool)["ready"] == 2


def test_a_large_block_is_gathered_and_scattered_across_every_boundary(pool):
    rng = random.Random(3)
    whole = noise(3 * (16 << 10) + 77).tobytes()
    for round in range(20):
        cuts = sorted(rng.choices(range(len(whole) + 1), k=9))
        ends = [0, *cuts, len(whole)]
        key = keys(str(round), range(16))[0]
        assert pool.store(key, [whole[a:b] for a, b in zip(ends, ends[1:])])
        cuts = [0, *sorted(rng.choices(range(len(whole) + 1), k=7)), len(whole)]
        out = [bytearray(b - a) for a, b in zip(cuts, cuts[1:])]
        assert pool.read_into(key, out) and b"".join(out) == whole


def test_blocks_are_evicted_and_objects_are_not(path):
    with create(path, size="8M") as pool:
        pool.put("stays", noise(1 << 20))
        for number in range(40):
            assert pool.keep(f"kept {number}", noise(1 << 20, number))
        assert pool.keep("kept 39", b"another") is False
        assert pool.get("kept 39") == noise(1 << 20, 39).tobytes()
        assert "kept 0" not in pool and pool.stat()["evictions"] > 30
        left = [name for name in pool if name.startswith("kept")]
        assert all(pool.get(name) == noise(1 << 20, int(name.split()[1])).tobytes() for name in left)
        with pytest.raises(PoolFull, match="no space for"):
            for number in range(40):
                pool.put(f"object {number}", noise(1 << 20, number))
        assert pool.get("stays") == noise(1 << 20).tobytes()
        holds(pool)


SHARES = """
import sys, numpy as np, lamina.pool
with lamina.pool.open(sys.argv[1]) as pool:
    mine, other = sys.argv[2:]
    assert pool.node > 0
    for number in range(200):
        pool.put(f"{mine} {number}", np.full(number * 50, ord(mine), np.uint8))
        seen = pool.get(f"{other} {number}")
        assert seen is None or seen == other.encode() * (number * 50), number
        assert pool.get("before") == b"x" * 100_000
    print(pool.stat()["hits"])
"""


def test_two_processes_share_a_pool(pool, path):
    pool.put("before", b"x" * 100_000)
    both = [started(SHARES, path, *names) for names in ("ab", "ba")]
    assert all(int(process.communicate(timeout=120)[0]) >= 200 for process in both)
    assert all(process.returncode == 0 for process in both)
    for mine in "ab":
        for number in range(200):
            assert pool.get(f"{mine} {number}") == mine.encode() * (number * 50)
    assert holds(pool)["ready"] == 401


DIES = """
import sys, os, numpy as np, lamina.pool
pool = lamina.pool.open(sys.argv[1])
print("ready", flush=True)
number = 0
while True:
    number += 1
    data = np.full(1000 + number % 97 * 4001, number % 251, np.uint8)
    pool.put(f"put {number % 5}", data)
    pool.keep(f"kept {os.getpid()} {number}", data)
    pool.store(lamina.pool.keys(f"{os.getpid()} {number}", range(16))[0], [data[:500], data[500:]])
    if number % 3 == 0:
        pool.delete(f"put {number % 5}")
"""


def test_a_process_that_is_killed_in_the_middle_leaves_nothing_broken(pool, path):
    rng = random.Random(4)
    pool.put("stays", b"stays")
    for _ in range(8):
        process = started(DIES, path)
        assert process.stdout.readline() == "ready\n"
        until = time.monotonic() + rng.uniform(0.02, 0.3)
        while time.monotonic() < until:
            # Never torn: all bytes are the same.
            found = pool.get(f"put {rng.randrange(5)}")
            assert found is None or found == found[:1] * len(found)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        deadline = time.monotonic() + 10
        while pool.stat()["nodes"] > 1 or pool.stat()["reserved"] > 0:
            assert time.monotonic() < deadline, pool.stat()
        holds(pool)
    assert pool.get("stays") == b"stays" and pool.stat()["recoveries"] == 8


def test_a_fork_opens_the_pool_itself(pool, path):
    script = """
import os, sys, lamina.pool
pool = lamina.pool.open(sys.argv[1])
pool.put("parent", b"p")
child = os.fork()
if child == 0:
    try:
        pool.get("parent")
    except lamina.LaminaError as why:
        assert "before this process was forked" in str(why)
        pool.close()
        with lamina.pool.open(sys.argv[1]) as own:
            assert own.get("parent") == b"p" and own.node != 0
            own.put("child", b"c")
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert pool.get("child") == b"c"
pool.close()
"""
    done = run(script, path)
    assert done.returncode == 0, done.stderr
    # Nobody is attached any more but this process.
    assert pool.stat()["nodes"] == 1 and pool.get("child") == b"c"


def test_a_fork_whose_preparation_fails_leaves_others_opening(pool, path):
    # As a signal's handler that raises fails it.
    script = """
import os, sys, threading, lamina.pool
pool = lamina.pool.open(sys.argv[1])
look, failed = lamina.pool._all_open, []
def fails():
    if failed:
        return look()
    failed.append(True)
    raise InterruptedError
lamina.pool._all_open = fails
if (child := os.fork()) == 0:
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7 and failed
free = []
thread = threading.Thread(target=lambda: free.append(lamina.pool._OPENING.acquire(blocking=False)))
thread.start()
thread.join()
assert free == [True]
"""
    done = run(script, path)
    assert done.returncode == 0, done.stderr


# The end of a script whose process dies and leaves a fork that lives until its input ends.
FORKS_AND_DIES = """
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print("forked", flush=True)
os.kill(os.getpid(), 9)
"""


def death_is_noticed(pool):
    deadline = time.monotonic() + 10
    while pool.stat()["nodes"] > 1:
        assert time.monotonic() < deadline, pool.stat()


def test_the_death_of_a_parent_is_noticed_while_its_fork_lives(pool, path):
    script = """
import os, sys, lamina.pool
pool = lamina.pool.open(sys.argv[1])
""" + FORKS_AND_DIES
    words = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "forked\n"
        process.wait()
        death_is_noticed(pool)
        process.stdin.close()


def test_the_death_of_a_busy_parent_is_noticed_while_its_forks_live(pool, path):
    # Threads in Python's calls and a connector's are all in the pool when it forks, five times.
    script = """
import os, sys, threading, lamina.pool
from lamina.lmcache import Connector
connector = Connector(sys.argv[1], create=False)
pool = lamina.pool.open(sys.argv[1])
def reads():
    out = bytearray(4 << 20)
    while True:
        assert pool.get_into("large", out) and pool.get("large") == out
def submits():
    outs = [bytearray(4 << 20) for _ in range(8)]
    while True:
        connector.submit_batch_get(["large"] * 8, outs)
        while not connector.drain_completions():
            pass
for work in (reads, reads, submits):
    threading.Thread(target=work, daemon=True).start()
for _ in range(5):
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
assert pool.get("small") == b"s"
print("forked", flush=True)
os.kill(os.getpid(), 9)
"""
    pool.put("large", noise(4 << 20))
    pool.put("small", b"s")
    words = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "forked\n"
            process.wait()
            death_is_noticed(pool)
        finally:
            process.kill()
            process.stdin.close()


def test_a_fork_while_others_open_is_none_of_their_nodes(pool, path):
    script = """
import os, sys, threading, lamina.pool
pool, end, opened = lamina.pool.open(sys.argv[1]), threading.Event(), threading.Semaphore(0)
def opens():
    while not end.is_set():
        lamina.pool.open(sys.argv[1]).close()
        opened.release()
threads = [threading.Thread(target=opens) for _ in range(3)]
for thread in threads:
    thread.start()
for round in range(50):
    opened.acquire()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # Whatever the parent has open, this one has not.
        try:
            pool.get("a")
        except lamina.LaminaError:
            os.write(writing, b"closed")
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 10) == b"closed"
    os.close(reading)
    assert os.waitpid(child, 0)[1] == 0
""" + FORKS_AND_DIES
    words = [sys.executable, "-c", script, str(path)]
    pipes = {name: subprocess.PIPE for name in ("stdin", "stdout", "stderr")}
    with subprocess.Popen(words, text=True, **pipes) as process:
        try:
            assert process.stdout.readline() == "forked\n", process.stderr.read()
            process.wait()
            death_is_noticed(pool)
        finally:
            process.kill()
            process.stdin.close()
        assert process.stderr.read() == ""


def test_threads_that_read_check_ask_submit_and_fork_do_not_wait_for_each_other(path):
    script = """
import os, select, sys, threading, time, lamina.pool
from lamina.lmcache import Connector
connector = Connector(sys.argv[1], size="32M")
pool = connector._pool
pool.put("a", bytes(1 << 20))
end = time.monotonic() + 2
def again(work):
    while time.monotonic() < end:
        work()
def asks():
    assert pool.node == 0
def checks():
    assert pool.check()["problems"] == []
def submits():
    connector.submit_batch_exists(["a"])
    select.select([connector.event_fd()], [], [], 10)
    assert all(ok for _, ok, _, _ in connector.drain_completions())
def forks():
    child = os.fork()
    if child == 0:
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    time.sleep(0.05)
def forgets():
    other = Connector(sys.argv[1], create=False)
    other.submit_batch_exists(["a"])
    del other
works = [lambda: pool.get("a"), lambda: pool.get("a"), asks, checks, submits, forks, forgets]
threads = [threading.Thread(target=again, args=(work,)) for work in works]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
connector.close()
"""
    words = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_pool_is_made_once_by_all_who_want_it(path):
    script = """
import sys, lamina.pool
with lamina.pool.open(sys.argv[1], create=True, size="16M") as pool:
    pool.put(sys.argv[2], sys.argv[2].encode())
"""
    processes = [started(script, path, number) for number in range(8)]
    assert [process.wait(60) for process in processes] == [0] * 8
    for process in processes:
        process.stdout.close()
    with open_pool(path) as pool:
        assert sorted(pool) == [str(number) for number in range(8)]
        assert 8 << 20 < pool.stat()["bytes"] <= 16 << 20
        holds(pool)


def test_files_that_are_no_pool_are_said_to_be_none(path, tmp_path):
    with pytest.raises(lamina.LaminaError, match="No such file"):
        open_pool(path)
    for content in (b"", bytes(1 << 20), noise(1 << 20).tobytes(), b"LAMIPOOL" + noise(100_000).tobytes(), b"x"):
        path.write_bytes(content)
        with pytest.raises(lamina.LaminaError, match="no pool here|cannot map|damaged"):
            open_pool(path)
    for call in (lambda: create(path), lambda: open_pool(path, create=True)):
        with pytest.raises(lamina.LaminaError, match="may hold what somebody wants|holds something else"):
            call()
    assert path.read_bytes() == b"x"
    # A file that is not empty has its own size.
    with pytest.raises(ValueError, match="cannot have 1 bytes"):
        create(path, size="8M", force=True)
    assert path.read_bytes() == b"x"
    path.write_bytes(noise(8 << 20).tobytes())
    create(path, size="8M", force=True).close()
    with open_pool(path) as pool, pytest.raises(lamina.LaminaError, match="attached"):
        create(path, force=True)
    assert pool is not None
    os.truncate(path, 65536)
    with pytest.raises(lamina.LaminaError, match="it needs .* bytes and the memory has 65536"):
        open_pool(path)
    with pytest.raises(lamina.LaminaError, match="directory"):
        open_pool(tmp_path)
    for size in ("", "5X", "-1", 0, -5, "1.5G", 1 << 63):
        with pytest.raises(ValueError, match="size is|pool has"):
            create(tmp_path / "other", size=size)
    with pytest.raises(TypeError, match="not 1.5"):
        create(tmp_path / "other", size=1.5)
    assert not (tmp_path / "other").exists()
    create(tmp_path / "of-numpy", size=np.int64(8 << 20), nodes=np.int64(3)).close()
    assert (tmp_path / "of-numpy").stat().st_size <= 8 << 20
    with pytest.raises(ValueError, match="a pool cannot have"):
        create(tmp_path / "other", size=(1 << 63) - 1)
    with pytest.raises(ValueError, match="65 nodes: it has 1 to 64"):
        create(tmp_path / "other", nodes=65)
    for make in (create, lambda *path, **said: open_pool(*path, create=True, **said)):
        for size, nodes in ((1, 16), ("1M", 64)):
            with pytest.raises(ValueError, match=f"bytes: for {nodes} nodes it has [0-9]+ at least"):
                make(tmp_path / "other", size=size, nodes=nodes)
        assert not (tmp_path / "other").exists()
        (tmp_path / "zeros").write_bytes(bytes(4096))
        with pytest.raises(ValueError, match="cannot have 4096 bytes"):
            make(tmp_path / "zeros")
        assert (tmp_path / "zeros").stat().st_size == 4096
    # What is there is opened, whatever a new one would be.
    create(tmp_path / "small", size="1M").close()
    open_pool(tmp_path / "small", create=True, size=1, nodes=64).close()


def test_a_pool_whose_file_was_removed_goes_on(pool, path):
    path.unlink()
    pool.put("a", b"a")
    assert pool.get("a") == b"a"
    with pytest.raises(lamina.LaminaError, match="No such file"):
        open_pool(path)


def test_a_pool_of_random_bytes_behind_its_head_gives_errors_only(path):
    with create(path, size="8M", nodes=2) as pool:
        pool.put("a", bytes(1000))
        pool.store(keys("m", range(16))[0], [bytes(5000)])
    whole = bytearray(path.read_bytes())
    # An access outside of the mapping ends the process.
    script = """
import sys, lamina.pool
try:
    with lamina.pool.open(sys.argv[1]) as pool:
        for call in (lambda: pool.get("a"), lambda: pool.list(), lambda: pool.stat(), lambda: pool.put("b", b"b"),
                     lambda: pool.read(lamina.pool.keys("m", range(16))[0]), lambda: pool.check(repair=True)):
            try:
                call()
            except lamina.LaminaError as why:
                print(why)
except lamina.LaminaError as why:
    print(why)
"""
    rng = random.Random(5)
    for round in range(6):
        damaged = bytearray(whole)
        start, length = rng.randrange(128, 200_000), rng.choice([8, 64, 5000, 100_000])
        damaged[start : start + length] = noise(length, round).tobytes()
        path.write_bytes(damaged)
        done = run(script, path)
        assert done.returncode == 0, (round, done.stderr)


def test_damage_is_found_told_and_mended(pool, path):
    pool.put("a", b"0123456789" * 100)
    pool.put("b", b"b")
    content = path.read_bytes()
    at = content.index(b"0123456789" * 100)
    with path.open("r+b") as file:
        file.seek(at + 500)
        file.write(b"x")
    for call in (lambda: pool.get("a"), lambda: pool.get_into("a", bytearray(1000))):
        with pytest.raises(lamina.LaminaError, match="damaged: an object's bytes at"):
            call()
    assert [problem["what"] for problem in pool.check()["problems"]] == ["bytes that do not check"]
    assert pool.check(repair=True)["repaired"]
    assert pool.get("a") is None and pool.get("b") == b"b"
    holds(pool)


def test_a_signal_does_not_end_the_wait_for_a_pool_that_another_makes(tmp_path):
    script = """
import fcntl, os, signal, struct, sys, lamina.pool

class Enough(Exception):
    pass

def hold(path):
    # The byte of who makes the pool.
    held = os.open(path, os.O_RDWR | os.O_CREAT)
    lock = struct.pack("hh4xqqi4x", fcntl.F_WRLCK, os.SEEK_SET, (1 << 62) - 1, 1, 0)
    fcntl.fcntl(held, fcntl.F_OFD_SETLK, lock)
    return held

def handler(*_):
    global signals
    signals += 1
    if signals == 3:
        os.close(held)
    if may_end and signals == 6:
        raise Enough

signals, held, may_end = 0, hold(sys.argv[1]), False
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
with lamina.pool.open(sys.argv[1], create=True, size="8M") as pool:
    signal.setitimer(signal.ITIMER_REAL, 0)
    pool.put("a", b"a")
assert signals >= 3
signals, held, may_end = 3, hold(sys.argv[2]), True
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
try:
    lamina.pool.open(sys.argv[2], create=True, size="8M")
except Enough:
    signal.setitimer(signal.ITIMER_REAL, 0)
    print("enough")
"""
    done = run(script, tmp_path / "one", tmp_path / "other")
    assert (done.returncode, done.stdout) == (0, "enough\n"), done.stderr


def test_threads_share_a_node_also_while_it_is_checked(pool):
    def work(number):
        for round in range(60):
            data = noise(1000 * number + round, number)
            pool.put(f"{number}", data)
            assert pool.get(f"{number}") == data.tobytes()
            assert pool.store(keys(f"{number} {round}", range(16))[0], [data])
        return number

    with ThreadPoolExecutor(8) as threads:
        running = [threads.submit(work, number) for number in range(8)]
        checks = 0
        while not all(each.done() for each in running):
            holds(pool)
            checks += 1
        assert [each.result() for each in running] == list(range(8)) and checks > 0
    assert holds(pool)["ready"] == 8 + 480


def test_other_threads_of_python_run_while_it_works(tmp_path):
    with create(tmp_path / "pool", size="256M") as pool:
        data = np.zeros(100 << 20, np.uint8)
        seconds = []

        def work():
            for call in (lambda: pool.put("a", data), lambda: pool.get_into("a", data), lambda: pool.check()):
                begun = time.perf_counter()
                call()
                seconds.append((begun, time.perf_counter()))

        thread = threading.Thread(target=work)
        thread.start()
        moments = []
        while thread.is_alive():
            moments.append(time.perf_counter())
            time.sleep(0)
        for begun, ended in seconds:
            fifth = (ended - begun) / 5
            assert any(begun + fifth < moment < ended - fifth for moment in moments)


def test_a_pool_that_was_closed_says_so(path):
    pool = create(path, size="8M")
    pool.put("a", b"a")
    pool.close()
    pool.close()
    for call in (lambda: pool.get("a"), lambda: pool.put("a", b""), pool.list, pool.stat, pool.check, lambda: pool.node):
        with pytest.raises(lamina.LaminaError, match="closed: open it again"):
            call()
    with open_pool(path) as again:
        assert again.get("a") == b"a" and again.stat()["nodes"] == 1
    # One that is only forgotten leaves, too.
    forgotten = open_pool(path)
    del forgotten
    with open_pool(path) as again:
        assert again.stat()["nodes"] == 1


def test_all_nodes_can_be_taken(path):
    create(path, size="8M", nodes=2).close()
    with open_pool(path) as one, open_pool(path) as other:
        assert {one.node, other.node} == {0, 1}
        with pytest.raises(lamina.LaminaError, match="all 2 nodes of the pool are attached"):
            open_pool(path)


def test_only_a_device_codes_what_it_is_told(path):
    with pytest.raises(lamina.LaminaError, match="not in a mount of a device"):
        create(path, kv=(64, 128))
    assert not path.exists()


def test_torch_lends_and_takes(pool):
    torch = pytest.importorskip("torch")
    tensor = torch.randn(64, 64).to(torch.bfloat16)
    pool.put("t", tensor)
    out = torch.zeros_like(tensor)
    assert pool.get_into("t", out) and torch.equal(out, tensor)
    with pytest.raises(ValueError, match="contiguous"):
        pool.put("t", tensor.T)


def real_cache():
    """The chunks of 256 tokens of a real KV cache: K and V, layers, tokens, channels."""
    path = pathlib.Path(__file__).parents[2] / "guest-tests/models/stories260K-kv-bf16.safetensors"
    data = np.fromfile(path, np.uint8)
    start = 8 + int(data[:8].view("<u8")[0])
    header = json.loads(data[8:start].tobytes())
    header.pop("__metadata__", None)
    rows = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        _, layer, _, sequence, kind = name.split(".")
        rows[int(sequence), kind, int(layer)] = data[start + begin : start + end].view(np.uint16).reshape(entry["shape"])
    layers = 1 + max(layer for _, _, layer in rows)
    for sequence in sorted({sequence for sequence, _, _ in rows}):
        whole = np.stack([[rows[sequence, kind, layer] for layer in range(layers)] for kind in "kv"])
        for first in range(0, whole.shape[2], 256):
            yield np.ascontiguousarray(whole[:, :, first : first + 256])


def stored_bytes(path):
    """What the device stores of a file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return int(os.getxattr(path, "user.lamina.stored"))


def test_a_pool_in_a_mount_is_coded_as_it_says(mounted):
    files, chunks = mounted / "files", list(real_cache())
    whole, taken = sum(chunk.nbytes for chunk in chunks), {}
    for name, said in (("opaque", {}), ("bf16", {"format": "bf16"}), ("kv", {"kv": (32, 256)})):
        with create(files / name, size="16M", **said) as pool:
            for number, chunk in enumerate(chunks):
                assert pool.keep(f"chunk {number}", chunk)
            out = np.zeros_like(chunks[0])
            for number, chunk in enumerate(chunks):
                assert pool.get_into(f"chunk {number}", out) and (out == chunk).all()
            taken[name] = stored_bytes(files / name)
            assert pool.check()["problems"] == []
    # With all of the pool's metadata.
    assert taken["kv"] < taken["bf16"] < taken["opaque"]
    assert whole / taken["kv"] > 1.45, (whole, taken)
    # Whoever comes later wants the same, or is told.
    with open_pool(files / "kv", create=True, kv=(32, 256)) as pool:
        assert pool.get("chunk 3") == chunks[3].tobytes()
    for said in ({"kv": (64, 256)}, {"format": "fp16"}, {"format": "fp16", "kv": (32, 256)}):
        with pytest.raises(lamina.LaminaError, match="was not made to be coded as"):
            open_pool(files / "kv", create=True, **said)
    with open_pool(files / "kv") as pool:
        assert pool.stat()["nodes"] == 1
    with pytest.raises(lamina.LaminaError, match="cannot be coded as bf17"):
        create(files / "wrong", format="bf17")
    with pytest.raises(lamina.LaminaError, match="cannot hold a pool"):
        create(mounted / "views", kv=(32, 256))


def test_a_pool_in_a_mount_holds_what_is_of_several_classes(mounted):
    path, chunks = mounted / "files" / "classes", list(real_cache())
    noise = np.random.default_rng(5).bytes(3 << 20)
    # The same cache once as rows of two layers.
    wide = [np.ascontiguousarray(chunk.reshape(-1, 2, *chunk.shape[-2:]).swapaxes(1, 2)) for chunk in chunks]
    with create(path, size="64M") as pool:
        for number, chunk in enumerate(chunks):
            assert pool.keep(f"narrow {number}", chunk, kv=(32, 256))
            pool.put(f"wide {number}", wide[number], format="bf16", kv=(64, 256))
        pool.put("noise", noise)
        (key,) = keys("classes", range(16))
        assert pool.store(key, [chunks[0], chunks[1]], kv=(32, 256))
        with pytest.raises(lamina.LaminaError, match="bf17"):
            pool.put("wrong", b"x", format="bf17")
        with pytest.raises(lamina.LaminaError, match="0,256"):
            pool.put("wrong", b"x", kv=(0, 256))
        stored_bytes(path)
        for number, chunk in enumerate(chunks):
            assert pool.get(f"narrow {number}") == chunk.tobytes() and pool.get(f"wide {number}") == wide[number].tobytes()
        assert pool.get("noise") == noise and pool.read(key) == chunks[0].tobytes() + chunks[1].tobytes()
        shares = {share["class"]: share["ready_bytes"] for share in pool.stat()["by_class"]}
        whole = sum(chunk.nbytes for chunk in chunks)
        assert shares == {"": len(noise), "bf16 32,256": whole + chunks[0].nbytes + chunks[1].nbytes, "bf16 64,256": whole}
        assert holds(pool)["ready"] == 2 * len(chunks) + 2


def test_a_pool_in_the_base_window_holds_what_is_of_a_class(program, tmp_path):
    where, (chunk, *_) = tmp_path / "mounted", real_cache()
    with lamina.mount(on=where, capacity=64 << 20) as device, create(where / "base", size="64M") as pool:
        pool.put("opaque", b"x" * 1000)
        pool.put("narrow", chunk, kv=(32, 256))
        (tensor,) = device.tensors()
        assert (tensor.format, tensor.nbytes % (2 << 20)) == ("bf16", 0)
        assert pool.get("narrow") == chunk.tobytes() and pool.get("opaque") == b"x" * 1000
        with pytest.raises(lamina.LaminaError, match="bf17"):
            pool.put("wrong", b"x", format="bf17")
        assert holds(pool)["ready"] == 2


def test_a_chunk_of_a_class_does_not_make_the_pool_one_of_it(program, tmp_path):
    where, (chunk, *_) = tmp_path / "mounted", real_cache()
    base = where / "base"
    with lamina.mount(on=where, capacity=64 << 20), create(base, size="64M") as pool:
        pool.put("one", chunk, kv=(256, 128))
        with pytest.raises(lamina.LaminaError, match="was not made to be coded as"):
            open_pool(base, create=True, kv=(256, 128))
        # Who stores values of one kind says so with each.
        other, said = open_for(base, create=True, size="64M", nodes=16, format=None, kv=(256, 128))
        assert said == ("bf16", (256, 128))
        other.close()
        assert pool.get("one") == chunk.tobytes()


def test_a_class_wants_a_device(pool):
    with pytest.raises(lamina.LaminaError, match="in a mount only"):
        pool.put("a", b"x", kv=(32, 256))
    pool.put("a", b"x")


def test_a_pool_in_the_base_window_is_a_tensor_where_its_objects_are(program, tmp_path):
    where, chunks = tmp_path / "mounted", list(real_cache())
    base = where / "base"
    with lamina.mount(on=where, capacity=64 << 20) as device, open_pool(base, create=True, kv=(32, 256)) as pool:
        for number, chunk in enumerate(chunks):
            pool.put(f"chunk {number}", chunk)
        (tensor,) = device.tensors()
        assert (tensor.name, tensor.format) == (f"pool@{tensor.dpa:#x}", "bf16")
        assert tensor.dpa >= 128 and tensor.dpa % 4096 == 0 and tensor.nbytes == pool.stat()["bytes"]
        device.flush()
        ((stored,),) = [[each["stored_bytes"] for each in device.stats()["tensors"]]]
        assert sum(chunk.nbytes for chunk in chunks) / stored > 1.45
        # A view of what was pooled: the eight upper bits and three more.
        view = tensor.array("e8m3").reshape(-1).view(np.uint16)
        whole = tensor.array().reshape(-1).view(np.uint16)
        assert (view == whole & np.uint16(0xFFF0)).all() and whole.any()
        with pytest.raises(lamina.LaminaError, match="was not made to be coded as"):
            open_pool(base, create=True, kv=(64, 256))
        pool.close()
        with create(base, kv=(64, 256), force=True) as again:
            assert again.list() == [] and len(device) == 1


def test_no_pool_takes_a_base_window_with_files(mounted):
    precious = mounted / "files" / "precious"
    precious.write_bytes(b"precious" * 1000)
    for force in (False, True):
        with pytest.raises(lamina.LaminaError, match="base: files/ lie there"):
            create(mounted / "base", force=force)
    assert precious.read_bytes() == b"precious" * 1000


def test_a_mount_behind_a_symbolic_link_is_a_mount(mounted, tmp_path):
    (link := tmp_path / "link").symlink_to(mounted)
    (file := tmp_path / "file").symlink_to(mounted / "files" / "other")
    for path in (link / "files" / "pool", file):
        with create(path, size="16M", kv=(32, 256)) as pool:
            pool.put("a", b"x" * 1000)
        with open_pool(path, create=True, kv=(32, 256)) as pool:
            assert pool.get("a") == b"x" * 1000
    for name in ("pool", "other"):
        assert os.getxattr(mounted / "files" / name, "user.lamina.kv") == b"32,256"


def test_processes_share_a_pool_in_a_mount(mounted):
    path = mounted / "files" / "pool"
    with create(path, size="32M", kv=(32, 256)) as pool:
        pool.put("before", b"x" * 100_000)
        both = [started(SHARES, path, *names) for names in ("ab", "ba")]
        assert all(int(process.communicate(timeout=120)[0]) >= 200 for process in both)
        assert holds(pool)["ready"] == 401
