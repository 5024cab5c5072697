"""The calls of LMCache's native plug-ins, as it makes them, without LMCache."""

import ctypes
import os
import select
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import lamina
from lamina.lmcache import Connector
from lamina.pool import open as open_pool

#: As LMCache writes them: model, rank, group and hash of a chunk, and a salt.
KEY = "meta-llama/Llama-3.1-8B-Instruct@00000000@0@{:064x}@salt"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pool"


@pytest.fixture
def connector(path):
    connector = Connector(path, size="64M")
    yield connector
    connector.close()


def names(count, first=0):
    return [KEY.format(number) for number in range(first, first + count)]


def values(count, length=100_000):
    return [np.random.default_rng(number).integers(0, 256, length, np.uint8) for number in range(count)]


def views(arrays):
    return [memoryview(array) for array in arrays]


def ended(connector, *wanted, seconds=30.0):
    """The completions of what was submitted, once the descriptor says that there are some."""
    poll, found = select.poll(), {}
    poll.register(connector.event_fd(), select.POLLIN)
    deadline = time.monotonic() + seconds
    while not set(wanted) <= set(found):
        assert time.monotonic() < deadline, (wanted, found)
        if poll.poll(500):
            for number, ok, error, results in connector.drain_completions():
                assert number not in found
                found[number] = (ok, error, results)
    return [found[number] for number in wanted]


def test_values_of_other_rows_than_the_pool_was_made_with_are_a_class_of_their_own(mounted):
    path = mounted / "files" / "kv"
    for rows, own in ((64, True), (32, False)):
        connector = Connector(path, size="64M", dtype="bf16", channels=rows, window=256)
        arrays, number = values(2, 1 << 18), [f"{rows} {number}" for number in range(2)]
        stored = connector.submit_batch_set(number, views(arrays))
        assert ended(connector, stored)[0][:2] == (True, "")
        outs = [np.empty_like(array) for array in arrays]
        read = connector.submit_batch_get(number, views(outs))
        assert ended(connector, read)[0] == (True, "", [True, True])
        assert all((out == array).all() for out, array in zip(outs, arrays, strict=True))
        connector.close()
        with open_pool(path) as pool:
            classes = {share["class"]: share["ready_bytes"] for share in pool.stat()["by_class"]}
        assert classes == ({"": 1 << 19} if own else {"": 1 << 19, "bf16 32,256": 1 << 19})
    with pytest.raises(lamina.LaminaError, match="bf17"):
        Connector(path, dtype="bf17")


def test_the_five_calls(connector):
    keys, stored = names(5), values(5)
    assert ended(connector, connector.submit_batch_exists(keys)) == [(True, "", [False] * 5)]
    assert ended(connector, connector.submit_batch_set(keys, views(stored))) == [(True, "", None)]
    assert ended(connector, connector.submit_batch_exists([*names(2, 100), *keys])) == [(True, "", [False] * 2 + [True] * 5)]
    out = [np.zeros_like(value) for value in stored]
    assert ended(connector, connector.submit_batch_get(keys, views(out))) == [(True, "", [True] * 5)]
    assert all((one == other).all() for one, other in zip(out, stored, strict=True))
    assert ended(connector, connector.submit_batch_delete([keys[1], keys[3], "none"])) == [(True, "", [True, True, False])]
    out = [np.zeros_like(value) for value in stored]
    assert ended(connector, connector.submit_batch_get(keys, views(out))) == [(True, "", [True, False, True, False, True])]
    assert (out[2] == stored[2]).all() and not out[1].any()
    # Nothing is left to tell, and the descriptor says so.
    assert connector.drain_completions() == [] and not select.select([connector.event_fd()], [], [], 0)[0]


def test_buffers_are_ctypes_views_as_lmcache_makes_them(connector):
    stored, out = (ctypes.c_ubyte * 1000)(*range(250), *range(250)), (ctypes.c_ubyte * 1000)()
    assert memoryview(stored).format == "<B"
    ended(connector, connector.submit_batch_set(["k"], [memoryview(stored)]))
    assert ended(connector, connector.submit_batch_get(["k"], [memoryview(out)]))[0][2] == [True]
    assert bytes(out) == bytes(stored)


def test_numbers_are_of_all_calls_and_many_are_under_way(connector):
    keys, stored = names(40), values(40, 50_000)
    stores = [connector.submit_batch_set([key], [memoryview(value)]) for key, value in zip(keys, stored, strict=True)]
    assert all(ok for ok, _, _ in ended(connector, *stores))
    out = [np.zeros_like(value) for value in stored]
    loads = [connector.submit_batch_get([key], [memoryview(value)]) for key, value in zip(keys, out, strict=True)]
    asks = [connector.submit_batch_exists(keys) for _ in range(5)]
    assert len({*stores, *loads, *asks}) == 85
    for ok, error, results in ended(connector, *loads, *asks):
        assert ok and not error and all(results)
    assert all((one == other).all() for one, other in zip(out, stored, strict=True))
    assert ended(connector, connector.submit_batch_set([], [])) == [(True, "", None)]
    assert ended(connector, connector.submit_batch_exists([])) == [(True, "", [])]


def test_what_a_key_has_stays(connector):
    first, second = values(2, 1000)
    ended(connector, connector.submit_batch_set(["k"], [first]))
    assert ended(connector, connector.submit_batch_set(["k"], [second])) == [(True, "", None)]
    out = np.zeros_like(first)
    ended(connector, connector.submit_batch_get(["k"], [out]))
    assert (out == first).all()


def test_a_value_that_is_damaged_fails_once_and_is_stored_anew(connector, path):
    keys, stored = names(2), values(2)
    ended(connector, connector.submit_batch_set(keys, views(stored)))
    at = path.read_bytes().index(stored[0].tobytes())
    with path.open("r+b") as file:
        file.seek(at + 50_000)
        file.write(bytes([stored[0][50_000] ^ 1]))
    out = [np.zeros_like(value) for value in stored]
    ((ok, error, results),) = ended(connector, connector.submit_batch_get(keys, views(out)))
    assert (ok, results) == (False, [False, True]) and "does not check" in error
    assert ended(connector, connector.submit_batch_exists(keys)) == [(True, "", [False, True])]
    assert ended(connector, connector.submit_batch_set(keys, views(stored))) == [(True, "", None)]
    assert ended(connector, connector.submit_batch_get(keys, views(out))) == [(True, "", [True, True])]
    assert all((one == other).all() for one, other in zip(out, stored, strict=True))


def test_long_keys_that_differ_only_in_their_end_are_two(connector):
    keys = [f"{'m' * 1000}@{number}" for number in range(3)]
    stored = values(3, 10)
    ended(connector, connector.submit_batch_set(keys, stored))
    out = [np.zeros(10, np.uint8) for _ in keys]
    assert ended(connector, connector.submit_batch_get(keys, out))[0][2] == [True] * 3
    assert all((one == other).all() for one, other in zip(out, stored, strict=True))
    ((ok, error, _),) = ended(connector, connector.submit_batch_set(["x" * 1025, "short"], values(2, 10)))
    assert not ok and "a name has 1025 bytes, more than 1024" in error
    assert ended(connector, connector.submit_batch_exists(["short"]))[0][2] == [True]


def test_a_failure_names_the_key_and_the_others_are_read(connector, path):
    stored = values(2, 1000)
    ended(connector, connector.submit_batch_set(["a", "b"], stored))
    out = [np.zeros(999, np.uint8), np.zeros(1000, np.uint8)]
    ((ok, error, results),) = ended(connector, connector.submit_batch_get(["a", "b"], out))
    assert (ok, results) == (False, [False, True])
    assert error == "a: 1000 bytes are stored, and the buffer has 999"
    assert (out[1] == stored[1]).all() and not out[0].any()
    with pytest.raises(ValueError, match="2 keys and 1 buffers"):
        connector.submit_batch_get(["a", "b"], out[:1])
    with pytest.raises(ValueError, match="read-only"):
        connector.submit_batch_get(["a"], [bytes(1000)])
    with pytest.raises(ValueError, match="0 threads"):
        Connector(path, threads=0)


def test_a_submit_does_not_wait(path):
    connector = Connector(path, size="512M", threads=1)
    try:
        arrays = values(8, 32 << 20)
        begun = time.perf_counter()
        number = connector.submit_batch_set(names(8), views(arrays))
        submitted = time.perf_counter() - begun
        ended(connector, number)
        whole = time.perf_counter() - begun
        assert submitted < whole / 10, (submitted, whole)
    finally:
        connector.close()


def test_buffers_are_held_until_their_end_is_told(connector):
    buffer = bytearray(1 << 20)
    number = connector.submit_batch_set(["k"], [buffer])
    with pytest.raises(BufferError):
        buffer.append(1)
    ended(connector, number)
    buffer.append(1)


def test_values_are_evicted_when_space_is_wanted(path):
    connector = Connector(path, size="16M")
    try:
        for number in range(60):
            (told,) = ended(connector, connector.submit_batch_set(names(1, number), values(1, 1 << 20)))
            assert told == (True, "", None)
        there = ended(connector, connector.submit_batch_exists(names(60)))[0][2]
        assert there[-1] and not there[0] and 4 < sum(there) < 16
        ((ok, error, _),) = ended(connector, connector.submit_batch_set(["large"], [bytes(32 << 20)]))
        assert not ok and "large: no space for 33554432 bytes" in error
    finally:
        connector.close()


OTHER = """
import sys, select, numpy as np
from lamina.lmcache import Connector
connector = Connector(sys.argv[1], create=False)
keys = sys.argv[2:]
def ended(number):
    select.select([connector.event_fd()], [], [], 30)
    ((found, ok, error, results),) = connector.drain_completions()
    assert found == number and ok, error
    return results
out = [np.zeros(100_000, np.uint8) for _ in keys]
assert all(ended(connector.submit_batch_get(keys, out)))
print([int(each.sum()) for each in out], flush=True)
ended(connector.submit_batch_set(["of the other"], [b"o" * 1000]))
if "killed" in sys.argv:
    connector.submit_batch_set([f"unfinished {number}" for number in range(1000)], [np.ones(10_000, np.uint8)] * 1000)
    import os; os.kill(os.getpid(), 9)
connector.close()
"""


@pytest.mark.parametrize("end", [[], ["killed"]])
def test_two_processes_share_a_pool(connector, path, end):
    keys, stored = names(5), values(5)
    ended(connector, connector.submit_batch_set([*keys, *end], [*stored, *stored[: len(end)]]))
    words = [sys.executable, "-c", OTHER, str(path), *keys, *end]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (-9 if end else 0), done.stderr
    assert done.stdout.split("\n")[0] == str([int(value.sum()) for value in [*stored, *stored[: len(end)]]])
    out = bytearray(1000)
    assert ended(connector, connector.submit_batch_get(["of the other"], [out]))[0][2] == [True]
    assert out == b"o" * 1000
    # What a dead process began is there whole or not at all.
    rest = [f"unfinished {number}" for number in range(1000)]
    out = [np.zeros(10_000, np.uint8) for _ in rest]
    ((ok, error, found),) = ended(connector, connector.submit_batch_get(rest, out))
    assert ok, error
    assert all(each.all() if is_there else not each.any() for each, is_there in zip(out, found, strict=True))


def test_an_end_waits_for_what_was_submitted(path):
    connector = Connector(path, size="64M")
    connector.submit_batch_set(names(20), values(20))
    connector.close()
    connector.close()
    with pytest.raises(lamina.LaminaError, match="closed"):
        connector.submit_batch_exists(names(1))
    with open_pool(path) as pool:
        assert sorted(pool) == names(20)
        assert pool.stat()["nodes"] == 1 and pool.check()["problems"] == []


def test_ends_at_once_all_wait_for_what_was_submitted(path):
    connector = Connector(path, size="512M", threads=1)
    arrays = values(40, 4 << 20)
    numbers = [connector.submit_batch_set([name], [view]) for name, view in zip(names(40), views(arrays), strict=True)]
    threads = [threading.Thread(target=connector.close) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert connector.drain_completions() == [(number, True, "", None) for number in numbers]
    with open_pool(path) as pool:
        assert sorted(pool) == names(40) and pool.stat()["nodes"] == 1


def test_many_threads_submit(connector):
    told, lock, failures = {}, threading.Lock(), []

    def drain():
        while len(told) < 8 * 50:
            select.select([connector.event_fd()], [], [], 1)
            for number, ok, error, results in connector.drain_completions():
                if not ok:
                    failures.append(error)
                told[number] = results

    def submit(thread):
        for round in range(50):
            value = np.full(1000 + round, thread, np.uint8)
            number = connector.submit_batch_set([f"{thread} {round}"], [value])
            with lock:
                numbers.add(number)

    numbers: set[int] = set()
    threads = [threading.Thread(target=submit, args=(number,)) for number in range(8)]
    threads.append(threading.Thread(target=drain))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(told) == numbers and len(numbers) == 400 and failures == []


def test_a_fork_closes_a_connector_that_is_not_its_own(path):
    script = """
import os, sys, lamina
from lamina.lmcache import Connector
connector = Connector(sys.argv[1], size="64M")
number = connector.submit_batch_set([str(key) for key in range(50)], [bytes(1 << 20)] * 50)
child = os.fork()
if child == 0:
    try:
        connector.submit_batch_exists(["0"])
    except lamina.LaminaError as why:
        assert "before this process was forked" in str(why)
        connector.close()
        connector.close()
        del connector
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
connector.close()
assert connector.drain_completions() == [(number, True, "", None)]
"""
    words = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


def test_one_that_is_forgotten_leaves(path):
    connector = Connector(path, size="16M")
    descriptor = connector.event_fd()
    connector.submit_batch_set(["k"], [b"value"])
    del connector
    with open_pool(path) as pool:
        assert pool.get("k") == b"value" and pool.stat()["nodes"] == 1
    with pytest.raises(OSError):
        os.fstat(descriptor)
