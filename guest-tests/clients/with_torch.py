"""PyTorch loads a model of bf16 from a mount: with_torch.py MODEL.safetensors FOLDER

FOLDER has the same model in the mount. The references are made by PyTorch of what it loads from the disk.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file


def same(one, other):
    """Bit for bit."""
    bits = {1: torch.uint8, 2: torch.int16}[one.element_size()]
    return one.dtype == other.dtype and torch.equal(one.view(bits), other.view(bits))


def main():
    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    full = load_file(str(model))
    wanted = {"": lambda tensor: tensor}
    for mantissa in (3, 1):
        mask = -1 << (7 - mantissa)
        wanted[f"@e8m{mantissa}"] = lambda tensor, mask=mask: (tensor.view(torch.int16) & mask).view(torch.bfloat16)
    if hasattr(torch, "float8_e4m3fn"):
        # With so many guard planes nothing of bf16 is left out. It is as PyTorch casts it, but for
        # what saturates.
        wanted["@fp8_e4m3fn+g4"] = lambda tensor: tensor.float().clamp(-448, 448).to(torch.float8_e4m3fn)
        wanted["@fp8_e5m2+g5"] = lambda tensor: tensor.float().clamp(-57344, 57344).to(torch.float8_e5m2)
    for view, reference in wanted.items():
        shown = load_file(str(folder / f"{model.stem}{view}.safetensors"))
        assert set(shown) == set(full), view
        for name, tensor in shown.items():
            assert same(tensor, reference(full[name])), (view, name)
    print(f"PyTorch {torch.__version__}: {len(full)} tensors at {len(wanted)} precisions are right")


if __name__ == "__main__":
    main()
