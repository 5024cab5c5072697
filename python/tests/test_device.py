"""A mounted device from Python: arrays over its memory, and what they hold against slow references."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import ml_dtypes
import numpy as np
import pytest

import lamina

BF16 = ml_dtypes.bfloat16


def weights(count=100_000, seed=0):
    return np.random.default_rng(seed).normal(0, 0.02, count).astype(BF16)


def test_what_is_stored_is_read_at_every_precision(device):
    values = weights().reshape(100, 1000)
    tensor = device.store("w", values)
    assert (tensor.array().view(np.uint16) == values.view(np.uint16)).all()
    for view, mask in (("full", 0xFFFF), ("e8m3", 0xFFF0), ("e8m0", 0xFF80)):
        got = tensor.array(view)
        assert got.dtype == BF16 and got.shape == values.shape and not got.flags.writeable
        assert (got.view(np.uint16) == values.view(np.uint16) & np.uint16(mask)).all()
    cast = tensor.array("fp8_e4m3fn+g4")
    assert cast.dtype == ml_dtypes.float8_e4m3fn
    assert (cast.view(np.uint8) == values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)).all()
    assert set(tensor.views) >= {"full", "e8m3", "e8m0", "fp8_e4m3fn+g4"}


def test_an_array_is_the_mapping_itself(device):
    tensor = device.store("w", weights())
    span = device._windows.span("base", tensor.dpa, tensor.nbytes)
    assert tensor.array().ctypes.data == span.address == tensor.array().ctypes.data
    tensor.array("e8m3")
    (view,) = [view for view in device._control.views() if view["view"] == "e8m3"]
    span = device._windows.span("views", view["offset"], view["length"])
    assert tensor.array("e8m3").ctypes.data == span.address
    assert np.asarray(tensor).ctypes.data == tensor.array().ctypes.data


def test_stores_through_the_array_reach_views_after_a_flush(device):
    tensor = device.create("w", (64, 64), BF16)
    view = tensor.array("e8m3")
    assert not view.any()
    tensor.array()[:] = BF16(1.0)
    tensor.flush()
    assert (view == BF16(1.0)).all()


def test_kv_caches_take_less(device):
    rng = np.random.default_rng(1)
    cache = (rng.normal(0, 4, 256) + rng.normal(0, 0.05, (1024, 256)).cumsum(axis=0)).astype(BF16)
    device.store("rows", cache)
    device.store("kv", cache, kv=(256, 128))
    assert (device["kv"].array("full").view(np.uint16) == cache.view(np.uint16)).all()
    stored = {tensor["name"]: tensor["stored_bytes"] for tensor in device.stats()["tensors"]}
    assert 0 < stored["kv"] < stored["rows"] < cache.nbytes


def test_a_layout_that_a_tensor_does_not_have_is_refused(device):
    values, others = weights(1024 * 64).reshape(1024, 64), weights(1024 * 64, 1).reshape(1024, 64)
    device.store("rows", values)
    device.store("kv", values, kv=(64, 128))
    assert device["rows"].kv is None and device["kv"].kv == (64, 128)
    for name, kv in (("rows", (64, 128)), ("kv", (64, 64)), ("kv", (32, 128))):
        with pytest.raises(ValueError, match=f"{name} is there already"):
            device.store(name, others, kv=kv)
        assert (device[name].array("full").view(np.uint16) == values.view(np.uint16)).all()
    device.store("kv", others, kv=(64, 128))
    device.store("rows", others)
    for name in device:
        assert (device[name].array("full").view(np.uint16) == others.view(np.uint16)).all()


@pytest.mark.parametrize("shape", [1, 5, (3, 5), (4, 5)], ids=str)
def test_tensors_of_int4_have_as_many_elements_as_they_are_asked_for(device, shape):
    count = int(np.prod(shape))
    tensor = device.create("w", shape, format="int4")
    assert tensor.elements == count and tensor.shape == ((shape,) if isinstance(shape, int) else shape)
    values = np.random.default_rng(0).integers(0, 256, -(-count // 2), np.uint8)
    tensor.store(values.reshape(tensor.array().shape))
    assert (device["w"].array().reshape(-1) == values).all()
    full = device["w"].array("full").reshape(-1)
    assert (full[: count // 2] == values[: count // 2]).all()
    # What is behind the last element is not one.
    assert count % 2 == 0 or full[-1] & 15 == values[-1] & 15


def test_tensors_come_and_go(device):
    names = [f"t{index}" for index in range(20)]
    for name in names:
        device.create(name, 4096, np.float16)
    assert sorted(device) == sorted(names) and len(device) == 20
    for name in names:
        device.remove(name)
    assert len(device) == 0 and "t0" not in device
    with pytest.raises(KeyError, match="t0"):
        device["t0"]


def test_a_tensor_that_was_removed_touches_nothing_that_comes_there(device):
    ones, twos = np.ones(4096, np.float32), np.full(4096, 2, np.float32)
    old = device.store("a", ones)
    device.remove("a")
    new = device.create("b", 4096, np.float32)
    new.store(twos)
    assert new.dpa == old.dpa
    for use in (lambda: old.store(ones * 9), old.array, lambda: old.array("full"), old.flush, lambda: np.asarray(old)):
        with pytest.raises(lamina.LaminaError, match="the tensor a is gone"):
            use()
    assert (new.array() == twos).all() and (new.array("full") == twos).all()
    # Of the same name, and not the same.
    device.remove("b")
    again = device.create("b", (64, 64), np.float32)
    assert again.dpa == new.dpa and again.nbytes == new.nbytes
    for use in (lambda: new.store(ones), new.array, lambda: new.array("full"), new.flush):
        with pytest.raises(lamina.LaminaError, match="another than this was.*64, 64"):
            use()
    assert (again.array() == 2).all()


def test_a_derived_tensor_is_detached(device):
    values = weights(1 << 16)
    near = values.copy()
    near.view(np.uint16)[::1000] ^= 1
    device.store("base", values)
    device.create("near", values.shape, BF16, base="base").store(near)
    device.store("alone", near)

    def stored():
        return {tensor["name"]: tensor["stored_bytes"] for tensor in device.stats()["tensors"]}

    before = stored()
    assert before["near"] < before["alone"] / 4
    with pytest.raises(lamina.LaminaError, match="near"):
        device.remove("base")
    device.detach("near")
    assert stored()["near"] == before["alone"]
    device.remove("base")
    assert (device["near"].array("full").view(np.uint16) == near.view(np.uint16)).all()
    device.detach("alone")  # it has none, and stays as it is
    with pytest.raises(lamina.LaminaError, match="nothing"):
        device.detach("nothing")


def test_a_model_is_tensors(program, tmp_path):
    path = tmp_path / "model.safetensors"
    values = weights(4096)
    header = json.dumps({"w": {"dtype": "BF16", "shape": [64, 64], "data_offsets": [0, 8192]}}).encode()
    header += b" " * (-len(header) % 8)
    path.write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())
    where = tmp_path / "mounted"
    with lamina.mount(path, on=where) as device:
        (tensor,) = device.tensors()
        assert tensor.shape == (64, 64)
        assert (tensor.array("full").view(np.uint16).reshape(-1) == values.view(np.uint16)).all()
        again = lamina.open(where, writable=False)
        assert list(again) == list(device)
        with pytest.raises(ValueError, match="read-only"):
            again[tensor.name].array()[0, 0] = 1
    assert not os.path.ismount(where)


def test_what_cannot_be_done_is_said(device):
    with pytest.raises(TypeError, match="complex64"):
        device.create("c", 4, np.complex64)
    with pytest.raises(ValueError, match="at least one element"):
        device.create("c", (4, 0), np.float32)
    with pytest.raises(ValueError, match="fewer than 2.63 elements"):
        device.create("c", (1 << 32, 1 << 32), np.float32)
    # Refused before all of it is sent.
    with pytest.raises(lamina.LaminaError, match="1048576 bytes"):
        device._control.create_view("w" * (2 << 20), "full")
    tensor = device.create("w", (4, 4), np.float32)
    with pytest.raises(ValueError, match="float64"):
        tensor.store(np.zeros((4, 4)))
    with pytest.raises(ValueError, match="shape"):
        tensor.store(np.zeros((4, 5), np.float32))
    with pytest.raises(lamina.LaminaError, match="already"):
        device.create("w", 4, np.float32)
    with pytest.raises(lamina.LaminaError, match="e9m9"):
        tensor.array("e9m9")
    with pytest.raises(lamina.LaminaError, match="nothing|no tensor"):
        device.remove("nothing")


def test_numbers_may_be_of_numpy(device):
    one, two, rows = np.int64(64), np.int32(2), (np.int64(64), np.uint16(128))
    assert device.create("one", one, BF16).shape == (64,)
    assert device.create("two", (two, 3), BF16).shape == (2, 3)
    assert device.create("array", np.array([2, 3]), BF16).shape == (2, 3)
    assert device.create("kv", (one, 64), BF16, kv=rows).kv == (64, 128)


def test_without_a_device_it_says_what_to_do(tmp_path, monkeypatch):
    for name in ("LAMINA_BASE", "LAMINA_VIEWS", "LAMINA_CTL"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(lamina.LaminaError, match="lamina-shim up"):
        lamina.open()
    with pytest.raises(lamina.LaminaError, match="no device is mounted"):
        lamina.open(tmp_path)
    monkeypatch.delenv("LAMINA", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(lamina.LaminaError, match="cargo install"):
        lamina.mount()


def test_what_was_mounted_leaves_no_directory(program, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    device = lamina.mount()
    (made,) = tmp_path.iterdir()
    assert os.path.ismount(made)
    device.close()
    assert list(tmp_path.iterdir()) == []
    device.close()


INTERRUPTED = """
import sys, lamina
try:
    lamina.mount(sys.argv[1])
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize("who", ["all of the group, as by a terminal", "Python alone"])
def test_a_mount_that_is_interrupted_leaves_nothing(program, tmp_path, tmp_path_factory, who):
    # Sockets' paths are short.
    path, folder, run = tmp_path / "model.safetensors", tmp_path / "made", tmp_path_factory.mktemp("run")
    folder.mkdir()
    values = np.random.default_rng(0).integers(0, 256, 256 << 20, np.uint8)
    header = json.dumps({"w": {"dtype": "BF16", "shape": [values.size // 2], "data_offsets": [0, values.size]}}).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.write(values)
    environment = dict(os.environ, TMPDIR=str(folder), XDG_RUNTIME_DIR=str(run), PYTHONPATH=os.pathsep.join(sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, path],
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
        # A job in the background has it ignored, and so would Python.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as mounting:
        is_loading, deadline = False, time.monotonic() + 60
        while not is_loading:
            assert mounting.poll() is None and time.monotonic() < deadline
            listed = subprocess.run([program, "ls", "--json"], env=environment, capture_output=True, text=True, check=True)
            is_loading = any(device["loading"] for device in json.loads(listed.stdout))
        signalled = os.kill if who == "Python alone" else os.killpg
        signalled(mounting.pid, signal.SIGINT)
        assert mounting.communicate(timeout=60)[0] == "interrupted\n"
    assert list(folder.iterdir()) == []
    assert list((run / "lamina" / "mounts").iterdir()) == []


def test_a_device_that_cannot_be_opened_is_taken_down_again(program, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise lamina.LaminaError("not today")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(lamina._device, "open", fails)
    for on in (None, tmp_path / "mounted"):
        with pytest.raises(lamina.LaminaError, match="not today"):
            lamina.mount(on=on)
        assert not os.path.ismount(tmp_path / "mounted")
        assert [found for found in tmp_path.iterdir() if found.name != "mounted"] == []


def test_a_device_is_taken_down_wherever_the_process_is_by_then(program, tmp_path, monkeypatch):
    where = tmp_path / "mounted"
    monkeypatch.chdir(tmp_path)
    device = lamina.mount(on="mounted")
    monkeypatch.chdir("/")
    # A close that fails is no close.
    monkeypatch.setenv("LAMINA", "/bin/false")
    with pytest.raises(lamina.LaminaError, match="umount"):
        device.close()
    assert os.path.ismount(where)
    monkeypatch.setenv("LAMINA", program)
    device.close()
    assert not os.path.ismount(where)


def test_a_device_that_is_gone_is_said_to_be_gone(program):
    device = lamina.mount()
    device.close()
    with pytest.raises(lamina.LaminaError, match="lamina ls"):
        device.stats()


def test_a_device_that_was_started_anew_is_opened_anew(program, tmp_path):
    where, image, values = tmp_path / "mounted", tmp_path / "image", weights(4096)
    before = lamina.mount(on=where, image=image, capacity=256 << 20)
    tensor = before.store("w", values)
    before.close()
    with pytest.raises(lamina.LaminaError, match="is gone"):
        tensor.array()
    with lamina.mount(on=where, image=image) as device:
        with pytest.raises(lamina.LaminaError, match="started anew"):
            tensor.array("e8m3")
        again = lamina.open(where)
        assert (again["w"].array().view(np.uint16) == values.view(np.uint16)).all()
        # What asks it something goes on.
        assert list(before) == list(device) == ["w"]


def test_each_partition_of_a_divided_device_has_its_own_names_and_bytes(divided, tmp_path):
    api = os.getxattr(divided, "user.lamina.api").decode()
    folders = {name: divided / "guests" / name for name in ("small", "large")}
    devices = {"shared": lamina.open(divided)}
    devices |= {name: lamina.open(folder, api=api) for name, folder in folders.items()}
    values = {name: weights(1 << 16, seed) for seed, name in enumerate(devices)}
    for name, device in devices.items():
        assert device.store("first", values[name][::-1], kv=(64, 128)).kv == (64, 128)
        device.store("w", values[name])
    for name, device in devices.items():
        assert list(device) == ["first", "w"]
        for found in (device["w"].array(), device["w"].array("full")):
            assert (found.view(np.uint16) == values[name].view(np.uint16)).all()
        assert (device["w"].array("e8m3").view(np.uint16) == values[name].view(np.uint16) & np.uint16(0xFFF0)).all()
        assert [tensor["name"] for tensor in device.stats()["tensors"]] == ["first", "w"]
        with pytest.raises(lamina.LaminaError, match="already"):
            device.create("w", 4, np.float32)
        device.remove("first")
        assert list(device) == ["w"]
    for window in ("base", "views"):
        (tmp_path / window).touch()
    with pytest.raises(lamina.LaminaError, match="no window of the device"):
        lamina.open(tmp_path, api=api)


def test_any_array_is_stored_as_its_elements_lie(device):
    values = weights(64 * 32).reshape(64, 32)
    for name, other in (("t", values.T), ("s", values[::2, ::3]), ("b", np.broadcast_to(values[0], (5, 32)))):
        assert (device.store(name, other).array("full").view(np.uint16) == np.ascontiguousarray(other).view(np.uint16)).all()
    with pytest.raises(TypeError, match=">f4"):
        device.store("big", np.zeros(4, ">f4"))
    assert "big" not in device


def test_torch_takes_it_without_a_copy(device):
    torch = pytest.importorskip("torch")
    tensor = device.store("w", weights(4096))
    array = tensor.array()
    found = tensor.torch()
    assert found.dtype == torch.bfloat16 and found.data_ptr() == array.ctypes.data
