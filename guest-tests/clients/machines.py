"""Two machines, which share nothing but a network: an engine of others carries objects from one's pool to the other's.

machines.py LAMINA KV.safetensors: as root, in a Python that has mooncake-transfer-engine-non-cuda. Each machine is a network
namespace with a device of its own, and the two see each other by a pair of virtual interfaces. Mooncake's store, over TCP, has its
master and one client at the first and the other client at the second; below both lie pools of Lamina.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MACHINES = {"lamina-a": "10.213.0.1", "lamina-b": "10.213.0.2"}
PORT = 50191
OBJECTS = 8


def run(*command, **given):
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, **given).stdout


def at(machine, *command):
    # Only the network is another: the mount is to be seen by all here.
    return ["nsenter", f"--net=/run/netns/{machine}", *map(str, command)]


def connect():
    """The namespaces, and what connects them."""
    for machine in MACHINES:
        run("ip", "netns", "add", machine)
    first, second = MACHINES
    run("ip", "link", "add", "lamina0", "netns", first, "type", "veth", "peer", "name", "lamina0", "netns", second)
    for machine, address in MACHINES.items():
        run(*at(machine, "ip", "address", "add", f"{address}/24", "dev", "lamina0"))
        for device in ("lo", "lamina0"):
            run(*at(machine, "ip", "link", "set", device, "up"))


def client(machine):
    """A client of Mooncake's store at a machine, which has memory for others' objects."""
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    master = next(iter(MACHINES.values()))
    status = store.setup(MACHINES[machine], "P2PHANDSHAKE", 256 << 20, 64 << 20, "tcp", "", f"{master}:{PORT}")
    assert status == 0, f"Mooncake's client cannot be set up: {status}"
    return store


def send(lamina, pool):
    """Gives all objects of the first machine's pool to Mooncake, and stays until it is told to end."""
    store = client("lamina-a")
    for each in json.loads(run(lamina, "pool", "ls", pool, "--json")):
        status = store.put(each["name"], run(lamina, "pool", "get", pool, each["name"]))
        assert status == 0, f"{each['name']} is not put: {status}"
    print("ready", flush=True)
    sys.stdin.read()
    store.close()


def receive(lamina, pool, names):
    """Takes them from Mooncake into the second machine's pool."""
    store = client("lamina-b")
    began, moved = time.monotonic(), 0
    for name in names:
        content = store.get(name)
        assert content, f"{name} is not there"
        moved += len(content)
        run(lamina, "pool", "put", pool, name, input=content)
    print(json.dumps({"bytes": moved, "seconds": time.monotonic() - began}), flush=True)
    store.close()


class Machine:
    """A device at a machine, with a pool in its files."""

    def __init__(self, lamina, name, folder):
        self.name, self.lamina = name, lamina
        folder.mkdir()
        options = ["--mount", folder / "mount", "--run-dir", folder / "run", "--capacity", "256M", "--views", "", "--files", "128M", "--json"]
        self.device = subprocess.Popen(at(name, lamina, "serve", *options), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        json.loads(self.device.stdout.readline())
        self.pool = folder / "mount" / "files" / "pool"
        run(lamina, "pool", "create", self.pool, "--size", "64M", "--kv", "32,256")

    def pool_run(self, *command, **given):
        return run(self.lamina, "pool", *command, **given)

    def end(self):
        self.device.terminate()
        self.device.wait(60)


def main(lamina, kv):
    kv = Path(kv).read_bytes()
    header = 8 + int.from_bytes(kv[:8], "little")
    content = kv[header:]
    part = len(content) // OBJECTS // 4096 * 4096
    objects = {f"kv {number}": content[number * part : (number + 1) * part] for number in range(OBJECTS)}
    machines, children = [], []
    connect()
    with tempfile.TemporaryDirectory() as folder:
        try:
            machines += [Machine(lamina, name, Path(folder) / name) for name in MACHINES]
            first, second = machines
            for name, content in objects.items():
                first.pool_run("put", first.pool, name, input=content)
            master = Path(sys.executable).with_name("mooncake_master")
            children.append(subprocess.Popen(at(first.name, master, "--rpc_port", PORT), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
            time.sleep(2)
            this = [sys.executable, __file__, lamina]
            sender = subprocess.Popen(at(first.name, *this, "send", first.pool), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            children.append(sender)
            for line in sender.stdout:
                if line.strip() == b"ready":
                    break
            else:
                raise AssertionError("the sender did not come so far")
            received = run(*at(second.name, *this, "receive", second.pool, *objects))
            moved = json.loads(received.splitlines()[-1])
            for name, content in objects.items():
                assert second.pool_run("get", second.pool, name) == content, f"{name} is not what was sent"
            second.pool_run("check", second.pool)
            os.sync()
            ratios = [os.getxattr(machine.pool, "user.lamina.stored").decode() for machine in machines]
            print(f"{len(objects)} objects of {part} bytes went from one pool to the other over TCP, all right: {moved}; the devices store {ratios} bytes of the pools' files")
        finally:
            for child in reversed(children):
                child.terminate()
                child.wait(60)
            for machine in machines:
                machine.end()
            for name in MACHINES:
                subprocess.run(["ip", "netns", "delete", name], check=False)


if __name__ == "__main__":
    match sys.argv[1:]:
        case [lamina, "send", pool]:
            send(lamina, pool)
        case [lamina, "receive", pool, *names]:
            receive(lamina, pool, names)
        case [lamina, kv]:
            main(lamina, kv)
        case _:
            sys.exit(__doc__)
