"""A pool of objects and of blocks of KV caches, which processes share in a file of a mount, any other file, or a devdax.

>>> import tempfile, lamina.pool, numpy as np
>>> folder = tempfile.TemporaryDirectory()
>>> pool = lamina.pool.create(folder.name + "/pool", size="16M")
>>> pool.put("weights", np.arange(4, dtype=np.float32))     # any array or buffer
>>> out = np.empty(4, np.float32)
>>> pool.get_into("weights", out), out.tolist()
(True, [0.0, 1.0, 2.0, 3.0])

Blocks of a KV cache are found by the chain of their tokens, are stored once, and evicted when space is wanted:

>>> keys = lamina.pool.keys("model and layout", range(48), block=16)
>>> k, v = np.ones((16, 8), np.float16), np.zeros((16, 8), np.float16)
>>> pool.store(keys[0], [k, v])                             # gathered; False: it is there already
True
>>> pool.prefix(keys)                                       # how many of the first blocks are there
1
>>> pool.read_into(keys[0], [k, v])                         # scattered
True
>>> pool.close()
>>> folder.cleanup()

Another process opens the same file with :func:`open`. Each process that does is a node of the pool; its threads share
it. What dies is recovered by the others. Other threads of Python run while a call works.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from . import _lamina
from ._bytes import bytes_of
from ._control import LaminaError
from ._declare import Declaration

__all__ = ["Object", "Pool", "PoolFull", "create", "keys", "open"]

Path = str | os.PathLike[str]
#: Rows of a KV cache: channels of a row, and tokens of a window.
Rows = tuple[int, int]

#: Bytes of a file that is made for a pool.
SIZE = 256 << 20
#: Processes that may be attached at a time.
NODES = 16


class PoolFull(LaminaError):
    """There is no space, and nothing that could be evicted."""


class Object(NamedTuple):
    """What has a name in a pool."""

    name: str
    nbytes: int


class Pool:
    """A pool, as this process is attached to it: made by :func:`open` and :func:`create`.

    Data may be ``bytes``, an array or a tensor of any dtype, or any other buffer, if its bytes lie in one piece.
    """

    def __init__(self, inner: _lamina.Pool, path: Path) -> None:
        self._inner = inner
        self.path = os.fspath(path)
        _OPEN.add(self)

    @property
    def node(self) -> int:
        """The number of this process among those that are attached."""
        return self._inner.node

    def put(self, name: str, data: Any, *, format: str | None = None, kv: Rows | None = None) -> None:
        """Stores an object, in place of one of that name. Others see the old bytes or the new. It is never evicted.

        In a mount, ``format`` and ``kv`` say what it is, if that is other than what the pool was made with: it lies
        among others of that class, which the device codes so.
        """
        self._inner.put(name, bytes_of(data), _class(format, kv))

    def keep(self, name: str, data: Any, *, format: str | None = None, kv: Rows | None = None) -> bool:
        """Stores something that may be evicted, unless the name is there. Whether this call did.

        If another is storing it, this waits for the end of that. ``format`` and ``kv`` are as of :meth:`put`.
        """
        return self._inner.keep(name, bytes_of(data), _class(format, kv))

    def get(self, name: str) -> bytes | None:
        """The bytes of what has this name; none if there is nothing."""
        return self._inner.get(name)

    def get_into(self, name: str, out: Any) -> bool:
        """Reads what has this name into an array or a buffer, which is as long. Whether it was there.

        If it is damaged, the error comes when ``out`` has been written to.
        """
        return self._inner.get_into(name, bytes_of(out))

    def length(self, name: str) -> int | None:
        """How many bytes what has this name has; none if there is nothing."""
        return self._inner.length(name)

    def delete(self, name: str) -> bool:
        """Removes what has this name. Whether it was there."""
        return self._inner.delete(name)

    def list(self) -> list[Object]:
        """All that has a name, in the order of names."""
        return [Object(name, nbytes) for name, nbytes in self._inner.list()]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.length(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter([name for name, _ in self._inner.list()])

    def store(
        self, key: bytes, pieces: Sequence[Any], *, format: str | None = None, kv: Rows | None = None
    ) -> bool:
        """Stores a block, gathered from pieces, unless it is there or another stores it. Whether this call did.

        ``format`` and ``kv`` are as of :meth:`put`.
        """
        return self._inner.store(key, [bytes_of(piece) for piece in pieces], _class(format, kv))

    def read(self, key: bytes) -> bytes | None:
        """A block's bytes; none if it is not there."""
        return self._inner.read(key)

    def read_into(self, key: bytes, pieces: Sequence[Any]) -> bool:
        """Reads a block, scattered into pieces, which together are as long. Whether it was there."""
        return self._inner.read_into(key, [bytes_of(piece) for piece in pieces])

    def remove(self, key: bytes) -> bool:
        """Removes a block. Whether it was there."""
        return self._inner.remove(key)

    def prefix(self, keys: Sequence[bytes]) -> int:
        """How many of the first blocks are there. They count as used."""
        return self._inner.prefix(builtins.list(keys))

    def stat(self) -> dict[str, Any]:
        """What the pool holds and this process did, as ``lamina pool stat --json`` prints it."""
        found: dict[str, Any] = json.loads(self._inner.stat())
        return found

    def _data(self) -> int:
        """Bytes of all that objects may lie in."""
        return int(self.stat()["bytes"])

    def check(self, repair: bool = False) -> dict[str, Any]:
        """Verifies everything, also while others use the pool; other threads of this process wait.

        What does not hold is listed in ``problems``. With ``repair`` it is dropped or taken back.
        """
        found: dict[str, Any] = json.loads(self._inner.check(repair))
        return found

    def close(self) -> None:
        """Leaves the pool. What was stored stays."""
        self._inner.close()

    def __enter__(self) -> Pool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Pool {self.path}>"


_OPEN: weakref.WeakSet[Pool] = weakref.WeakSet()
#: Held from before a pool is attached to until it is in ``_OPEN``, and while a thread forks: a fork
#: finds all that have to rest, and none begins meanwhile. A declaration may fork itself.
_OPENING = threading.RLock()
#: How long a fork waits for what others open, in seconds.
WAITING = 10.0


#: Of each thread's forks, the pools that rest, and whether it has ``_OPENING``. They are kept, or
#: those that are forgotten meanwhile would rest for ever.
_FORKING: dict[int, list[tuple[list[Pool], list[bool]]]] = {}


def _attached(path: Path, attach: Callable[[], _lamina.Pool]) -> Pool:
    """A pool, to which no thread attaches while another forks."""
    with _OPENING:
        return Pool(attach(), path)


def _all_open() -> list[Pool]:
    while True:
        # Who has waited long enough looks while others open.
        with contextlib.suppress(RuntimeError):
            return list(_OPEN)


def _before_fork() -> None:
    pools: list[Pool] = []
    has_opening: list[bool] = []
    # A signal's handler may raise anywhere here. The fork is made nevertheless, and what is noted
    # until then is undone after it.
    _FORKING.setdefault(threading.get_ident(), []).append((pools, has_opening))
    # One call takes it and notes that: no handler runs in between.
    has_opening.extend(map(_OPENING.acquire, (True,), (WAITING,)))
    for pool in _all_open():
        pools.append(pool)
        pool._inner.rest()


def _after_fork_in_parent() -> None:
    # A handler may have forked meanwhile: the last that began ends first.
    forks = _FORKING.get(threading.get_ident(), [])
    pools, has_opening = forks.pop() if forks else ([], [])
    try:
        for pool in pools:
            pool._inner.resume()
    finally:
        if any(has_opening):
            _OPENING.release()


def _after_fork_in_child() -> None:
    """A fork is no node of the pools of its parent: each has to open them itself."""
    global _OPENING
    _OPENING = threading.RLock()
    _FORKING.clear()
    for pool in _all_open():
        # The others are let go of whatever becomes of one, or their numbers would stay taken.
        with contextlib.suppress(BaseException):
            pool._inner.forked()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child
)


def keys(model: str, tokens: Any, *, block: int = 16) -> list[bytes]:
    """The keys of the blocks of a prefix: each says all tokens up to its block's end. What is over has none.

    ``model`` is to differ wherever something makes a block unusable: model, layout, format, the rank of a node.
    """
    found = np.asarray(tokens)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise ValueError(f"tokens are numbers in a row, not an array {found.dtype} of shape {found.shape}")
    if found.size and (int(found.min()) < 0 or int(found.max()) >= 1 << 32):
        raise ValueError(f"tokens are at least 0 and less than 2^32, and these are {found.min()} to {found.max()}")
    if block < 1:
        raise ValueError(f"a block has at least one token, not {block}")
    return _lamina.chain_keys(model, bytes_of(np.ascontiguousarray(found, np.uint32)), block)


def open(
    path: Path,
    *,
    create: bool = False,
    size: int | str = SIZE,
    nodes: int = NODES,
    format: str | None = None,
    kv: tuple[int, int] | None = None,
) -> Pool:
    """Attaches to the pool in a file. With ``create`` it is made if the file holds nothing, as by :func:`create`.

    Of several processes that do that at once one makes it. One that is there must have been made with the same format and
    rows, if any are said.
    """
    if not create:
        return _attached(path, lambda: _lamina.Pool.open(path))
    declare = None if format is None and kv is None else Declaration(path, format, kv)
    pool = _attached(path, lambda: _lamina.Pool.create(path, _parsed(size), nodes, declare, or_open=True))
    if declare is not None:
        try:
            declare.verify(pool._data)
        except BaseException:
            pool.close()
            raise
    return pool


#: What :meth:`Pool.put`, ``keep`` and ``store`` are told of what they store.
Said = tuple[str, Rows | None]


def open_for(
    path: Path, *, create: bool, size: int | str, nodes: int, format: str | None, kv: Rows | None
) -> tuple[Pool, Said | None]:
    """:func:`open` for who stores values of one kind, and what has to be said with each: none if it is the pool's own.

    A pool that is there may have been made with others: then the values are of a class of their own in it.
    """
    said = _class(format, kv)
    if said is None:
        return open(path, create=create, size=size, nodes=nodes), None
    declare = Declaration(path, format, kv)
    if create:
        pool = _attached(path, lambda: _lamina.Pool.create(path, _parsed(size), nodes, declare, or_open=True))
    else:
        pool = _attached(path, lambda: _lamina.Pool.open(path))
    try:
        if declare.is_own(pool._data):
            return pool, None
        # Refused now, and not by the first that stores.
        pool._inner.know(said)
    except BaseException:
        pool.close()
        raise
    return pool, said


def create(
    path: Path,
    *,
    size: int | str = SIZE,
    nodes: int = NODES,
    format: str | None = None,
    kv: tuple[int, int] | None = None,
    force: bool = False,
) -> Pool:
    """Makes an empty pool in a file, and attaches to it.

    A file that is there and not empty has its own size; others are made with ``size`` bytes, or "1G" and the like. One
    that holds something is refused without ``force``, with which that is lost; so is a devdax, of which nobody knows.
    A mount's ``base`` in which files, models or tensors lie is refused with it, too.

    In a mount, ``format`` says what the objects' elements are, and ``kv`` that they are rows of a KV cache: channels of a
    row, and tokens of a window. Then the device codes the pool so: the file if it lies in ``files/``, or of ``base`` the
    part in which objects are.
    """
    declare = None if format is None and kv is None else Declaration(path, format, kv)
    return _attached(path, lambda: _lamina.Pool.create(path, _parsed(size), nodes, declare, force=force))


def _class(format: str | None, kv: Rows | None) -> tuple[str, Rows | None] | None:
    return None if format is None and kv is None else (format or "bf16", kv)


def _parsed(size: int | str) -> int:
    """Bytes, of a number or a text such as 256M."""
    if not isinstance(size, str):
        try:
            found = operator.index(size)
        except TypeError:
            raise TypeError(f"a size is a number of bytes or a text such as 256M, not {size!r}") from None
    else:
        text = size.strip().upper()
        unit = {"K": 10, "M": 20, "G": 30, "T": 40}.get(text[-1:], 0)
        digits = text[:-1] if unit else text
        if not digits.isdecimal():
            raise ValueError(f"a size is a number of bytes, with K, M, G or T behind it, not {size!r}")
        found = int(digits) << unit
    if not 0 < found < 1 << 63:
        raise ValueError(f"a pool has more than 0 bytes and less than 2^63, not {found}")
    return found
