#!/usr/bin/env python3
"""Times one peer of the device's codecs on the bytes of a file, and prints what came of it as JSON.

    measure.py PEER FORMAT FILE SECONDS

PEER is zipnn, blosc2, bitshuffle or pcodec; FORMAT is what FILE holds: fp32, fp16, bf16, fp8_e4m3fn, fp8_e5m2 or int8. The answer is one
of these objects:

    {"state": "measured", "version": …, "call_seconds": …, "codecs": [{"codec": …, "stored_bytes": …, "unit_bytes": …,
        "encode": [seconds…], "decode": [seconds…], "read": [seconds…]}…]}
    {"state": "not_installed" | "not_applicable" | "failed", "why": …}

The rules:

* `encode` and `decode` are of the whole file in one call. A *unit* is the least that the codec decodes to give 4 KiB of it; `read` is
  the mean time of a unit in each of several passes over units in no order.
* Everything is decoded and compared with the file before anything is timed.
* One thread, and its time on a processor: what else runs on the machine is not counted. What the peer is called through costs time, too: `call_seconds` is a call in the same way that does nothing.
* Not timed is what is none of the peer's work: making the copy that ZipNN spoils, and fresh pages for results (the
  allocator keeps them). Where a peer has a way to write into memory that is there, it is used.
* Peers are called the shortest way: blosc2 and bitshuffle are C libraries and called as such; of ZipNN the C core that its class calls, with the
  class's own arguments, so that neither torch nor a copy that the class makes is in the way.
"""

import ctypes
import dataclasses
import gc
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import platform
import random
import statistics
import sys
import time
import zlib

BLOCK = 4096
# Bytes of an element.
FORMATS = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3fn": 1, "fp8_e5m2": 1, "int8": 1}
# Units read in a pass.
PASS = 64


class NotInstalled(Exception):
    """The peer is not there."""


class NotApplicable(Exception):
    """The peer does not know the format."""


class Failed(Exception):
    """The peer gave an error, or other bytes back."""


class Codec:
    """A codec that holds `data` coded. Subclasses define name, unit (bytes), encode, stored_bytes, decode and read."""

    def __init__(self, data, form):
        self.data, self.form, self.element = data, form, FORMATS[form]

    def source(self):
        """What `encode` takes. Not timed."""
        return self.data

    def units(self):
        """How many units `data` is."""
        return -(-len(self.data) // self.unit)


class ZipNN(Codec):
    """Groups of exponent bytes and of the others, Huffman-coded by the chunk."""

    name = "ZipNN"
    # buffers, whether the exponent is moved to one byte, byte order, chunk: as
    # ZipNN.compress_torch_numpy_byte has them.
    ARGUMENTS = {
        "fp32": (4, 1, 220, 256 << 10),
        "bf16": (2, 1, 10, 256 << 10),
        "fp16": (2, 0, 10, 256 << 10),
        "fp8_e4m3fn": (1, 1, 10, 128 << 10),
        "fp8_e5m2": (1, 1, 10, 128 << 10),
    }
    HEADER = 32

    def __init__(self, core, data, form):
        super().__init__(data, form)
        if form not in self.ARGUMENTS:
            raise NotApplicable(f"ZipNN has no {form}")
        self.core = core
        self.unit = self.ARGUMENTS[form][3]
        self.copy = bytearray(data)
        chunks = [data[at : at + self.unit] for at in range(0, len(data), self.unit)]
        self.chunks = [(self.code(bytearray(chunk)), len(chunk)) for chunk in chunks]

    def code(self, spoiled):
        buffers, bits, order, chunk = self.ARGUMENTS[self.form]
        # Kept as it is above 0.95 of its length; whether is decided after 10 % of the chunks.
        return self.core.zipnn_core(bytes(self.HEADER), spoiled, buffers, bits, order, 0, chunk, 0.95, 10, 1)

    def decoded(self, stored, length):
        buffers, bits, order, chunk = self.ARGUMENTS[self.form]
        return self.core.combine_dtype(memoryview(stored)[self.HEADER :], buffers, bits, order, chunk, length, 1)

    def source(self):
        self.copy[:] = self.data
        return self.copy

    def encode(self, source):
        self.stored = self.code(source)

    def stored_bytes(self):
        return len(self.stored)

    def decode(self):
        return self.decoded(self.stored, len(self.data))

    def read(self, unit):
        return self.decoded(*self.chunks[unit])


class Pcodec(Codec):
    """Numbers binned and tANS-coded, in pages."""

    name = "pcodec -8"
    # pcodec has no bf16 and no fp8: their bits are taken for integers.
    TYPES = {"fp32": "f4", "fp16": "f2", "bf16": "u2", "fp8_e4m3fn": "u1", "fp8_e5m2": "u1", "int8": "i1"}
    PAGE = 1 << 18  # elements: the default

    def __init__(self, numpy, pcodec, data, form):
        super().__init__(data, form)
        self.coder = pcodec.standalone
        self.config = pcodec.ChunkConfig(compression_level=8, enable_8_bit=self.element == 1)
        self.array = numpy.frombuffer(data, dtype=self.TYPES[form])
        self.out = numpy.empty_like(self.array)
        self.unit = min(self.PAGE * self.element, len(data))
        starts = range(0, len(self.array), self.PAGE)
        self.pages = [self.array[at : at + self.PAGE] for at in starts]
        self.pages = [(self.coder.simple_compress(page, self.config), len(page)) for page in self.pages]

    def source(self):
        return self.array

    def encode(self, source):
        self.stored = self.coder.simple_compress(source, self.config)

    def stored_bytes(self):
        return len(self.stored)

    def decode(self):
        self.coder.simple_decompress_into(self.stored, self.out)
        return self.out

    def read(self, unit):
        stored, length = self.pages[unit]
        page = self.out[:length]
        self.coder.simple_decompress_into(stored, page)
        return page


class InMemory(Codec):
    """A codec of a C library: everything is at an address."""

    def __init__(self, data, form, room):
        super().__init__(data, form)
        self.unit = BLOCK
        self.elements = len(data) // self.element
        self.input = (ctypes.c_ubyte * len(data)).from_buffer_copy(data)
        self.stored = (ctypes.c_ubyte * room)()
        self.out = (ctypes.c_ubyte * len(data))()
        self.block = (ctypes.c_ubyte * BLOCK)()
        self.at = {name: ctypes.addressof(getattr(self, name)) for name in ("input", "stored", "out", "block")}
        self.length = 0

    def stored_bytes(self):
        return self.length

    def expect(self, got, wanted):
        if got != wanted:
            raise Failed(f"{self.name} returned {got}, not {wanted}")


class Blosc(InMemory):
    """Blosc2: one chunk of blocks of 4 KiB, each filtered and compressed."""

    def __init__(self, library, name, compressor, level, shuffle, data, form):
        super().__init__(data, form, len(data) + (1 << 16))
        self.library, self.name = library, name
        self.compressor, self.level, self.shuffle = compressor.encode(), level, shuffle

    def source(self):
        # The library's settings are its process's.
        self.library.blosc1_set_compressor(self.compressor)
        self.library.blosc1_set_blocksize(BLOCK)
        return self.at["input"]

    def encode(self, source):
        self.length = self.library.blosc1_compress(
            self.level, self.shuffle, self.element, len(self.data), source, self.at["stored"], len(self.stored)
        )

    def decode(self):
        self.expect(self.library.blosc1_decompress(self.at["stored"], self.at["out"], len(self.out)), len(self.out))
        return self.out

    def read(self, unit):
        count = BLOCK // self.element
        self.library.blosc1_getitem(self.at["stored"], unit * count, count, self.at["block"])
        return self.block


class Bitshuffle(InMemory):
    """bitshuffle's transpose of each 4 KiB, nothing compressed."""

    name = "bitshuffle"

    def __init__(self, library, data, form):
        super().__init__(data, form, len(data))
        self.library, self.count, self.length = library, BLOCK // self.element, len(data)

    def source(self):
        return self.at["input"]

    def encode(self, source):
        done = self.library.bshuf_bitshuffle(source, self.at["stored"], self.elements, self.element, self.count)
        self.expect(done, self.length)

    def decode(self):
        self.library.bshuf_bitunshuffle(
            self.at["stored"], self.at["out"], self.elements, self.element, self.count
        )
        return self.out

    def read(self, unit):
        start = self.at["stored"] + unit * BLOCK
        self.library.bshuf_bitunshuffle(start, self.at["block"], self.count, self.element, self.count)
        return self.block


class BitshuffleLz4(InMemory):
    """bitshuffle's transpose and LZ4 of each 4 KiB: a length of four bytes, most significant first, and the block."""

    name = "bitshuffle + lz4"

    def __init__(self, library, data, form):
        self.library, self.count = library, BLOCK // FORMATS[form]
        room = library.bshuf_compress_lz4_bound(len(data) // FORMATS[form], FORMATS[form], self.count)
        super().__init__(data, form, room)
        self.encode(self.source())
        stored, starts = bytes(self.stored[: self.length]), [0]
        while starts[-1] < len(stored):
            starts.append(starts[-1] + 4 + int.from_bytes(stored[starts[-1] :][:4], "big"))
        self.starts = starts

    def source(self):
        return self.at["input"]

    def encode(self, source):
        self.length = self.library.bshuf_compress_lz4(
            source, self.at["stored"], self.elements, self.element, self.count
        )

    def decode(self):
        self.library.bshuf_decompress_lz4(
            self.at["stored"], self.at["out"], self.elements, self.element, self.count
        )
        return self.out

    def read(self, unit):
        start = self.at["stored"] + self.starts[unit]
        self.library.bshuf_decompress_lz4(start, self.at["block"], self.count, self.element, self.count)
        return self.block


@dataclasses.dataclass
class Peer:
    """What a loader gives: the codecs, whose they are, and a call that does nothing."""

    package: str
    codecs: list
    nothing: callable


def module(name):
    """The module of this name."""
    try:
        return importlib.import_module(name)
    except ImportError as why:
        raise NotInstalled(f"Python says: {why}") from why


def library(package, pattern, functions):
    """The C library in an installed package, without its Python; the arguments and results of its functions are declared."""
    found = importlib.util.find_spec(package)
    if found is None:
        raise NotInstalled(f"Python says: No module named {package!r}")
    folder = pathlib.Path(found.origin).parent
    files = sorted(folder.glob(pattern))
    if not files:
        raise NotInstalled(f"{folder} has no {pattern}")
    loaded = ctypes.CDLL(str(files[0]))
    for name, (result, *arguments) in functions.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


INT, SIZE, LONG, AT = ctypes.c_int, ctypes.c_size_t, ctypes.c_int64, ctypes.c_void_p


def nothing_in_c():
    """A call into C that does nothing, with arguments like the peers'."""
    move = ctypes.CDLL(None).memmove
    move.restype, move.argtypes = AT, (AT, AT, SIZE)
    byte = ctypes.c_ubyte()
    at = ctypes.addressof(byte)
    return lambda: move(at, at, 0)


def nothing_in_a_module():
    """A call of a compiled module's function that does nothing."""
    return lambda: zlib.crc32(b"")


def zipnn(data, form):
    core = module("zipnn_core")
    return Peer("zipnn", [ZipNN(core, data, form)], nothing_in_a_module())


def pcodec(data, form):
    return Peer("pcodec", [Pcodec(module("numpy"), module("pcodec"), data, form)], nothing_in_a_module())


def blosc2(data, form):
    functions = {
        "blosc2_init": (None,),
        "blosc2_set_nthreads": (ctypes.c_int16, ctypes.c_int16),
        "blosc1_set_compressor": (INT, ctypes.c_char_p),
        "blosc1_set_blocksize": (None, SIZE),
        "blosc1_compress": (INT, INT, INT, SIZE, SIZE, AT, AT, SIZE),
        "blosc1_decompress": (INT, AT, AT, SIZE),
        "blosc1_getitem": (INT, AT, INT, INT, AT),
    }
    loaded = library("blosc2", "lib/libblosc2.so*", functions)
    loaded.blosc2_init()
    loaded.blosc2_set_nthreads(1)
    shuffle, bitshuffle = 1, 2
    codecs = [
        Blosc(loaded, "Blosc2 bitshuffle + lz4", "lz4", 5, bitshuffle, data, form),
        # Blosc2's level 2 is zstd's 3.
        Blosc(loaded, "Blosc2 shuffle + zstd-3", "zstd", 2, shuffle, data, form),
    ]
    return Peer("blosc2", codecs, nothing_in_c())


def bitshuffle(data, form):
    whole = (LONG, AT, AT, SIZE, SIZE, SIZE)
    functions = {
        "bshuf_bitshuffle": whole,
        "bshuf_bitunshuffle": whole,
        "bshuf_compress_lz4": whole,
        "bshuf_decompress_lz4": whole,
        "bshuf_compress_lz4_bound": (SIZE, SIZE, SIZE, SIZE),
    }
    # The package has no wheel for every Python; hdf5plugin has the same library in it.
    package = "bitshuffle"
    try:
        loaded = library(package, "ext.*.so", functions)
    except NotInstalled:
        package = "hdf5plugin"
        loaded = library(package, "plugins/libh5bshuf.so", functions)
    return Peer(
        package, [Bitshuffle(loaded, data, form), BitshuffleLz4(loaded, data, form)], nothing_in_c()
    )


PEERS = {"zipnn": zipnn, "blosc2": blosc2, "bitshuffle": bitshuffle, "pcodec": pcodec}


def check(codec):
    """Codes and decodes everything once, and each unit, and compares."""
    codec.encode(codec.source())
    if codec.stored_bytes() <= 0:
        raise Failed(f"{codec.name} returned {codec.stored_bytes()} when encoding")
    if bytes(codec.decode()) != codec.data:
        raise Failed(f"{codec.name} gives other bytes back")
    for unit in range(codec.units()):
        start = unit * codec.unit
        if bytes(codec.read(unit)) != codec.data[start : start + codec.unit]:
            raise Failed(f"{codec.name} gives other bytes back for byte {start} on")


def seconds_of(work):
    # Of all threads: the one that ZipNN starts for each call counts, too.
    begun = time.process_time()
    work()
    return time.process_time() - begun


def orders(count):
    """Endlessly: which units of `count` a pass reads."""
    units = list(range(count))
    random.Random(1).shuffle(units)
    start = 0
    while True:
        yield (units[start:] + units[:start])[:PASS]
        start = (start + PASS) % count


def measured(peer, seconds):
    """Rounds of all codecs in turn until the time is over, one at least."""
    samples = [{"encode": [], "decode": [], "read": []} for _ in peer.codecs]
    passes = [orders(codec.units()) for codec in peer.codecs]
    calls = []
    gc.disable()
    begun = time.perf_counter()
    while True:
        for codec, sample, order in zip(peer.codecs, samples, passes):
            source = codec.source()
            sample["encode"].append(seconds_of(lambda: codec.encode(source)))
            sample["decode"].append(seconds_of(codec.decode))
            units = next(order)
            spent = seconds_of(lambda: [codec.read(unit) for unit in units])
            sample["read"].append(spent / len(units))
        calls.append(seconds_of(lambda: [peer.nothing() for _ in range(PASS)]) / PASS)
        if time.perf_counter() - begun >= seconds:
            break
    try:
        version = importlib.metadata.version(peer.package)
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    rows = [
        {"codec": codec.name, "stored_bytes": codec.stored_bytes(), "unit_bytes": codec.unit, **sample}
        for codec, sample in zip(peer.codecs, samples)
    ]
    return {
        "state": "measured",
        "version": f"{peer.package} {version}",
        "call_seconds": statistics.median(calls),
        "codecs": rows,
    }


def one_thread():
    """Has libraries that are loaded from now on use one thread and reuse their memory."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in [name for name in os.environ if name.startswith("BLOSC_")]:
        del os.environ[name]
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX: freed memory stays, from whichever
        # thread.
        for parameter, value in ((-1, 1 << 30), (-3, 32 << 20), (-8, 1)):
            libc.mallopt(parameter, value)


def main():
    if len(sys.argv) != 5 or sys.argv[1] not in PEERS or sys.argv[2] not in FORMATS:
        sys.exit(f"usage: measure.py {'|'.join(PEERS)} {'|'.join(FORMATS)} FILE SECONDS")
    name, form, file, seconds = sys.argv[1:]
    data = pathlib.Path(file).read_bytes()
    if not data or len(data) % BLOCK:
        sys.exit(f"measure.py: {file} has {len(data)} bytes, not some blocks of {BLOCK}")
    one_thread()
    try:
        peer = PEERS[name](data, form)
        for codec in peer.codecs:
            check(codec)
        answer = measured(peer, float(seconds))
    except NotInstalled as why:
        answer = {"state": "not_installed", "why": str(why)}
    except NotApplicable as why:
        answer = {"state": "not_applicable", "why": str(why)}
    except Exception as why:  # whatever a peer raises is its answer
        answer = {"state": "failed", "why": f"{type(why).__name__}: {why}"}
    json.dump(answer, sys.stdout)
    print()


if __name__ == "__main__":
    main()
