"""A tour: what a checkpoint takes, its views, a KV cache, and planes by hand.

    LAMINA=target/release/lamina python python/examples/tour.py guest-tests/models/stories260K-bf16.safetensors
"""

import sys

import ml_dtypes
import numpy as np

import lamina


def main(checkpoint: str) -> None:
    # What would a device make of it? No device is needed to ask.
    report = lamina.analyze(checkpoint, codecs=["tree"])
    (total,) = report["total"]["formats"]
    print(f"{checkpoint}: {total['logical_bytes']} bytes, ratio {total['codecs']['tree']['ratio']:.3f}")

    with lamina.mount(checkpoint) as device:
        # Tensors are arrays over the device's memory.
        tensor = max(device.tensors(), key=lambda tensor: tensor.nbytes)
        full = tensor.array().astype(np.float32)
        print(tensor)
        for view in ("e8m5", "e8m3", "e8m1", "fp8_e4m3fn+g4"):
            seen = tensor.array(view).astype(np.float32)
            print(f"  {view:14} largest error {np.abs(seen - full).max():.2e}")

        # A KV cache: rows of 64 channels, which the device stores channel by channel in windows of
        # 128 tokens.
        rng = np.random.default_rng(0)
        rows = (rng.normal(0, 4, 64) + rng.normal(0, 0.05, (1024, 64)).cumsum(axis=0)).astype(ml_dtypes.bfloat16)
        cache = device.create("kv", rows.shape, rows.dtype, kv=(64, 128))
        cache.array()[:] = rows
        cache.flush()
        assert (cache.array("full") == rows).all()

    # The same codec on arrays, without a device.
    coded = lamina.codec.compress(rows, kv=(64, 128))
    print(f"KV cache: {coded.nbytes} bytes in {coded.stored}, {coded.ratio:.2f} to 1; e8m3 fetches {coded.fetched('e8m3')}")
    planes = lamina.codec.planes(rows)
    print("planes, most significant first, share of ones:")
    print("  " + " ".join(f"{np.unpackbits(plane).mean():.2f}" for plane in planes[::-1]))
    assert (lamina.codec.from_planes(planes, rows.dtype, rows.shape) == rows).all()


if __name__ == "__main__":
    main(sys.argv[1])
