"""What a guest's Python does with its device. `test_guest.py` boots a guest that runs it."""

import ml_dtypes
import numpy as np

import lamina

BF16 = ml_dtypes.bfloat16


def bits(array):
    return np.asarray(array).view(np.uint16)


def masked(array, mantissa):
    return bits(array) & np.uint16(0xFFFF << (7 - mantissa) & 0xFFFF)


def views_of_the_model(device):
    names = list(device)
    assert names, "the device has no tensors"
    for name in names:
        tensor = device[name]
        full = tensor.array()
        assert full.dtype == BF16 and full.shape == tensor.shape
        assert full.ctypes.data == tensor.array().ctypes.data, "a copy was made"
        for view, mantissa in (("full", 7), ("e8m3", 3)):
            assert (bits(tensor.array(view)) == masked(full, mantissa)).all(), (name, view)
    return len(names)


def one_of_our_own(device):
    values = np.random.default_rng(0).normal(0, 0.02, (64, 1000)).astype(BF16)
    tensor = device.store("mine", values)
    view = tensor.array("e8m1")
    assert (bits(view) == masked(values, 1)).all()
    tensor.array()[:] = BF16(-1.5)
    tensor.flush()
    assert (view == BF16(-1.5)).all()
    assert device.stats()["writes"]["base_writes"] > 0
    device.remove("mine")
    assert "mine" not in device


def the_codec():
    values = np.random.default_rng(1).normal(0, 0.02, 100_001).astype(BF16)
    coded = lamina.codec.compress(values)
    assert coded.ratio > 1.3 and (bits(coded.view("full")) == bits(values)).all()


def refusals(device):
    for name, call in (("no such tensor", lambda: device["nothing"]), ("a tensor twice", lambda: device.create(next(iter(device)), 1, BF16))):
        try:
            call()
        except (KeyError, lamina.LaminaError, ValueError):
            continue
        raise AssertionError(f"taken: {name}")


def main():
    with lamina.open() as device:
        tensors = views_of_the_model(device)
        one_of_our_own(device)
        refusals(device)
    the_codec()
    print("tensors", tensors)


if __name__ == "__main__":
    main()
