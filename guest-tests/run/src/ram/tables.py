# A script's memory: the kernel's symbols as objects with their parts, an index by part, and numbers
# about them.
import re
from itertools import islice

SYMBOLS = 10_000


class Symbol:
    def __init__(self, address, kind, name):
        self.address = int(address, 16)
        self.kind = kind
        self.name = name
        self.parts = [part for part in re.split("[_.]", name) if part]


with open("/proc/kallsyms") as lines:
    symbols = [Symbol(*line.split()[:3]) for line in islice(lines, SYMBOLS)]
index = {}
for symbol in symbols:
    for part in symbol.parts:
        index.setdefault(part, []).append(symbol)
lengths = [len(symbol.name) / max(len(symbol.parts), 1) for symbol in symbols]
print("ready", flush=True)

input()
found = sum(map(len, index.values())) == sum(len(symbol.parts) for symbol in symbols)
print("ok" if found and len(lengths) == SYMBOLS else "wrong", flush=True)
