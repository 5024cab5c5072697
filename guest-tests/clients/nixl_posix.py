"""NIXL's POSIX plug-in on a mount: nixl_posix.py MOUNT KV.safetensors

By each of the plug-in's ways to the kernel, and with O_DIRECT, a KV cache is written to a file that is declared as one and
read back, and a tensor's file of the mount is read. All is held against what Python reads.
"""

import os
import sys
from pathlib import Path

import torch
from nixl_cu12._api import nixl_agent, nixl_agent_config

#: Bytes of a transfer's part.
PART = 1 << 20
WAYS = ("use_uring", "use_aio", "use_posix_aio")


def agent(way):
    made = nixl_agent("lamina", nixl_agent_config(backends=[]))
    made.create_backend("POSIX", {way: "true"})
    return made


def transfer(agent, operation, file, memory):
    """Moves all of `memory`, whole parts of it, to or from the beginning of the file."""
    parts = range(0, memory.numel(), PART)
    ours = agent.get_reg_descs([(memory.data_ptr(), memory.numel(), 0, "")], "DRAM")
    theirs = agent.get_reg_descs([(0, memory.numel(), file, "file")], "FILE")
    for each in (ours, theirs):
        agent.register_memory(each)
    handle = agent.initialize_xfer(
        operation,
        agent.get_xfer_descs([(memory.data_ptr() + at, PART, 0) for at in parts], "DRAM"),
        agent.get_xfer_descs([(at, PART, file) for at in parts], "FILE"),
        "lamina",
    )
    state = agent.transfer(handle)
    while state == "PROC":
        state = agent.check_xfer_state(handle)
    assert state == "DONE", (operation, state)
    agent.release_xfer_handle(handle)
    for each in (ours, theirs):
        agent.deregister_memory(each)


def aligned(count):
    """Zeros that begin at a page, as O_DIRECT wants them."""
    whole = torch.zeros(count + 4096, dtype=torch.uint8)
    begin = -whole.data_ptr() % 4096
    return whole[begin : begin + count]


def main():
    mount, kv = Path(sys.argv[1]), Path(sys.argv[2])
    cache = torch.frombuffer(bytearray(kv.read_bytes()), dtype=torch.uint8)
    count = cache.numel() // PART * PART
    assert count, f"{kv} is shorter than a part"
    data, path = aligned(count), mount / "files" / "nixl"
    data.copy_(cache[:count])
    for way in WAYS:
        for flags in (0, os.O_DIRECT):
            made, back = agent(way), aligned(count)
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | flags, 0o600)
            os.setxattr(path, "user.lamina.format", b"bf16")
            transfer(made, "WRITE", file, data)
            transfer(made, "READ", file, back)
            assert torch.equal(back, data), (way, flags)
            os.close(file)
            assert path.read_bytes() == data.numpy().tobytes(), (way, flags)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    stored = int(os.getxattr(path, "user.lamina.stored"))
    assert 0 < stored < count, (stored, count)
    view = mount / "models" / kv.stem / f"{kv.stem}@e8m3.safetensors"
    wanted = torch.frombuffer(bytearray(view.read_bytes()), dtype=torch.uint8)[:count]
    for way in WAYS:
        back, file = aligned(count), os.open(view, os.O_RDONLY)
        transfer(agent(way), "READ", file, back)
        os.close(file)
        assert torch.equal(back, wanted), way
    print(f"NIXL's POSIX plug-in by {len(WAYS)} ways: {count} bytes written, read and read at e8m3 are right; {stored} are stored")


if __name__ == "__main__":
    main()
