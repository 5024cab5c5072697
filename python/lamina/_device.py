"""A device, its tensors and their views, as arrays over its memory."""

from __future__ import annotations

import contextlib
import json
import math
import operator
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from . import _lamina
from ._control import Control, GuestControl, HostControl, LaminaError, PortControl
from ._dtypes import dtype_of, dtype_of_view, format_of

__all__ = ["Device", "Tensor", "mount", "open"]

Path = str | os.PathLike[str]

#: Bytes of the address space of a device that is mounted empty, unless said. Only what is stored
#: takes memory.
EMPTY = 1 << 30
#: Which word of the directory, at the start of the views window, each change of tensors and views
#: raises.
GENERATION = 2


class Tensor:
    """A tensor of a device: its own bytes, and views of them at other precisions.

    One that was removed, or is another by now, gives no array, stores nothing and flushes nothing. It is looked at before
    each of these: nothing keeps another program from removing it right after that.
    """

    def __init__(self, device: Device, info: Mapping[str, Any]) -> None:
        self._device = device
        self.name: str = info["name"]
        self.format: str = info["format"]
        self.dpa: int = info["dpa"]
        self.nbytes: int = info["length"]
        self.elements: int = info["elements"]
        layout = info["layout"]
        #: Channels of a token's row and tokens of a window of a KV cache; none for all else.
        self.kv: tuple[int, int] | None = None if layout["kind"] == "weight" else (layout["channels"], layout["window"])
        shape = tuple(info.get("shape") or ())
        self.shape: tuple[int, ...] = shape or (self.elements,)

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The elements' dtype; none for ``int4``, whose bytes hold two each."""
        return dtype_of(self.format)

    @property
    def views(self) -> list[str]:
        """The views that there are. :meth:`array` makes others."""
        return [view["view"] for view in self._device._control.views() if view["tensor"] == self.name]

    def array(self, view: str | None = None) -> np.ndarray[Any, Any]:
        """The tensor as an array over the device's memory, without a copy.

        Without ``view``, it is the tensor itself: stores to it are stores to the device, and :meth:`flush` brings them
        to the views. With one, for example ``e8m3``, it is that view, read-only; the view is made if there is none.
        The array is valid while the tensor is there and the device runs: a load after that ends the process with
        SIGBUS, as it does for every file that is mapped and goes. What removes the tensor later does not take the
        array back: it then lies over whatever comes to that place.
        """
        self._look_up()
        if view is None:
            span = self._device._windows.span("base", self.dpa, self.nbytes)
            bits = self.nbytes * 8 // max(self.elements, 1)
            return self._shaped(span, dtype_of(self.format) or np.dtype(np.uint8), bits)
        found = self._found(view)
        if found is None:
            self._device._control.create_view(self.name, view)
            found = self._found(view)
        if found is None:
            raise LaminaError(f"the view {view} of {self.name} was made and is not listed: was it removed?")
        span = self._device._windows.span("views", found["offset"], found["length"])
        return self._shaped(span, dtype_of_view(self.format, view, found["bits"]), found["bits"])

    def _look_up(self) -> None:
        """Refuses if the device is gone, or if its name is nothing's any more or another's: then others lie here."""
        self._device._check()
        info = self._device._listed().get(self.name)
        if info is None:
            raise LaminaError(f"the tensor {self.name} is gone: it was removed")
        found = Tensor(self._device, info)
        if found._place() != self._place():
            raise LaminaError(f"the tensor {self.name} is another than this was, {found!r}: look it up again by its name")

    def _place(self) -> tuple[Any, ...]:
        return (self.dpa, self.nbytes, self.elements, self.shape, self.format)

    def _found(self, view: str) -> dict[str, Any] | None:
        views = self._device._control.views()
        return next((one for one in views if one["tensor"] == self.name and one["view"] == view), None)

    def _shaped(self, span: _lamina.Span, dtype: np.dtype[Any], bits: int) -> np.ndarray[Any, Any]:
        data: np.ndarray[Any, Any] = np.frombuffer(memoryview(span), np.uint8)
        if dtype.itemsize * 8 != bits:
            return data
        array: np.ndarray[Any, Any] = data[: self.elements * dtype.itemsize].view(dtype).reshape(self.shape)
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        array = self.array()
        if dtype is not None and array.dtype != np.dtype(dtype):
            if copy is False:
                raise ValueError(f"{self.name} has the dtype {array.dtype}: as {dtype} it needs a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    def torch(self, view: str | None = None) -> Any:
        """The same as a tensor of PyTorch, without a copy. Views are read-only: do not store to theirs."""
        import torch

        array = self.array(view)
        name = array.dtype.name
        own = getattr(torch, name, None)
        # torch.from_numpy knows no dtypes of ml_dtypes, but their bits.
        bits = np.uint16 if array.itemsize == 2 else np.uint8
        return torch.from_numpy(array) if array.dtype.isbuiltin == 1 else torch.from_numpy(array.view(bits)).view(own)

    def store(self, values: Any) -> Tensor:
        """Stores an array of the same shape and dtype, and flushes."""
        values = np.asarray(values)
        own = self.array()
        if values.dtype != own.dtype or values.shape != own.shape:
            raise ValueError(
                f"{self.name} is {own.dtype} of shape {own.shape}, and the array {values.dtype} of shape "
                f"{values.shape}: convert it with .astype and .reshape"
            )
        own[...] = values
        return self.flush()

    def flush(self) -> Tensor:
        """Brings what was stored to the views: what is read of these afterwards has it."""
        self._look_up()
        self._device._control.flush(self.dpa, self.nbytes)
        return self

    def remove_view(self, view: str) -> None:
        """Removes a view. Arrays of it are of no use afterwards."""
        self._device._control.remove_view(self.name, view)

    def __repr__(self) -> str:
        return f"<Tensor {self.name} {self.format} {self.shape}: {self.nbytes} bytes at {self.dpa:#x}>"


class Device(Mapping[str, Tensor]):
    """An opened device: a mapping of names to tensors. Made by :func:`open` and :func:`mount`."""

    def __init__(self, windows: _lamina.Device, control: Control, where: str, base: str | None = None) -> None:
        self._windows = windows
        self._control = control
        self._where = where
        # What close() takes down, and the directory that was made for it.
        self._mounted: str | None = None
        self._made: str | None = None
        self._base = base
        # A generation of the directory, and the tensors that there were then, by name.
        self._known: tuple[int, dict[str, dict[str, Any]]] | None = None
        # As long as the windows are mapped, no other mount has its number.
        self._mount = None if base is None else os.stat(base).st_dev

    def _check(self) -> None:
        """Refuses memory of a mount that is gone: a load of it would end the process."""
        if self._base is None:
            return
        try:
            mount = os.stat(self._base).st_dev
        except OSError as why:
            raise LaminaError(f"the device {self._where} is gone ({why.strerror}): `lamina ls` tells which there are") from why
        if mount != self._mount:
            raise LaminaError(f"the device {self._where} was started anew: open it again, with lamina.open()")

    def _listed(self) -> dict[str, dict[str, Any]]:
        """The tensors by name. Only when the directory has changed they are asked for again: a load tells."""
        header = np.frombuffer(memoryview(self._windows.span("views", 0, 64)), "<u8")
        generation = int(header[GENERATION])
        known = self._known
        # A list may be newer than the generation, but never older: it is asked for once more then.
        if known is None or known[0] != generation:
            known = self._known = (generation, {info["name"]: info for info in self._control.tensors()})
        return known[1]

    def __getitem__(self, name: str) -> Tensor:
        for info in self._control.tensors():
            if info["name"] == name:
                return Tensor(self, info)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter([info["name"] for info in self._control.tensors()])

    def __len__(self) -> int:
        return len(self._control.tensors())

    def tensors(self) -> list[Tensor]:
        """All tensors, in the order of their addresses."""
        return [Tensor(self, info) for info in self._control.tensors()]

    def create(
        self,
        name: str,
        shape: int | tuple[int, ...],
        dtype: Any = None,
        *,
        format: str | None = None,
        kv: tuple[int, int] | None = None,
        codec: str | None = None,
        base: str | None = None,
    ) -> Tensor:
        """Makes a tensor over the bytes that are there: zeros, or what a tensor that was removed has left.

        ``kv`` says that it is a KV cache: channels of a token's row, and tokens of a window. ``format`` is for what has
        no dtype. What is like the tensor ``base`` is stored as differences to it, which then stays until
        :meth:`detach`.
        """
        if (dtype is None) == (format is None):
            raise TypeError("say either dtype or format")
        name_of_format = format or format_of(dtype)
        shape = _numbers(shape)
        elements = math.prod(shape)
        if elements < 1 or min(shape, default=1) < 1:
            raise ValueError(f"a tensor has at least one element, and the shape {shape} has {elements}")
        if elements >= 1 << 63:
            raise ValueError(f"a tensor has fewer than 2^63 elements, and the shape {shape} has {elements}")
        bits = dict(_lamina.formats()).get(name_of_format, 8)
        spec: dict[str, Any] = {
            "name": name,
            "length": -(-elements * bits // 8),
            # A byte of int4 may hold one more.
            "elements": elements,
            "shape": list(shape),
            "format": name_of_format,
        }
        if kv is not None:
            channels, window = _numbers(kv)
            spec["layout"] = {"kind": "kv", "channels": channels, "window": window}
        if codec is not None:
            spec["codec"] = codec
        if base is not None:
            spec["base"] = base
        self._control.create(spec)
        return self[name]

    def store(self, name: str, values: Any, *, kv: tuple[int, int] | None = None) -> Tensor:
        """Stores an array under a name: into the tensor that has it, or into a new one.

        ``kv`` is as for :meth:`create`. A tensor that is there and is not laid out so is an error.
        """
        values = np.asarray(values)
        tensor = self.get(name)
        if tensor is None:
            tensor = self.create(name, values.shape or (1,), values.dtype, kv=kv)
        elif kv is not None and tensor.kv != tuple(kv):
            raise ValueError(
                f"{name} is there already, {_laid_out(tensor.kv)} and not {_laid_out(kv)}: store without kv=, or remove it first"
            )
        return tensor.store(values.reshape(tensor.shape) if values.ndim == 0 else values)

    def remove(self, name: str) -> None:
        """Removes a tensor and its views. Arrays of them are of no use afterwards."""
        self._control.remove(name)

    def detach(self, name: str) -> None:
        """Stores a tensor that has a base by itself. It holds what it held, and the base may be removed then.

        One that has none stays as it is. A large one takes a while, in which loads and stores go on.
        """
        self._control.detach(name)

    def flush(self) -> None:
        """Brings everything that was stored to the views."""
        self._control.flush(0, self._windows.base_bytes)

    def stats(self) -> dict[str, Any]:
        """What the device counts, as ``lamina stats --json`` prints it; docs/counters.md explains it."""
        return self._control.stats()

    def close(self) -> None:
        """Takes down what :func:`mount` mounted. Arrays over it are of no use afterwards.

        If that fails the device is still there, and this can be called again.
        """
        if self._mounted is not None:
            _unmount(self._mounted, self._made)
            self._mounted = None

    def __enter__(self) -> Device:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Device {self._where}>"


def open(path: Path | None = None, *, api: Path | None = None, writable: bool = True) -> Device:
    """Opens a device: the one mounted on ``path``, or, without it, the one that this guest has.

    ``api`` is the socket of the device's API, where that is not found by the mount. Of a device that is divided among
    guests it is the partition whose windows lie in ``path``, with its own names.
    """
    if path is None:
        try:
            windows = _lamina.Device(writable=writable)
        except OSError as why:
            raise LaminaError(
                f"there is no device here: {why}. In a guest, `lamina-shim up` makes its memory; on a host, "
                "give the directory that it is mounted on, or use lamina.mount()"
            ) from None
        return Device(windows, GuestControl(windows), "of this guest")
    path = os.fspath(path)
    base, views = (os.path.join(path, name) for name in ("base", "views"))
    if not os.path.exists(views):
        raise LaminaError(f"no device is mounted on {path}: there is no {views}. `lamina mount` does that")
    if api is None:
        api = _api_of(path)
    host = HostControl(os.fspath(api))
    port = host.port_of(base)
    try:
        windows = _lamina.Device(base, views, writable=writable)
    except OSError as why:
        raise LaminaError(str(why)) from None
    control = host if port is None else PortControl(windows, port)
    return Device(windows, control, f"on {path}", base)


def mount(*models: Path, on: Path | None = None, capacity: int | None = None, image: Path | None = None) -> Device:
    """Starts a device that holds these models, mounted on a directory, and opens it.

    It needs the program ``lamina``: on the path, or where the environment variable ``LAMINA`` says. Without models it
    is empty. Without ``on``, a directory is made. ``with`` takes it down at the end; so does :meth:`Device.close`.
    """
    made = None
    if on is None:
        made = on = tempfile.mkdtemp(prefix="lamina-")
    # Whoever takes it down may have another working directory by then.
    where = os.path.abspath(on)
    arguments = ["mount", "--json"]
    if capacity is None and not models and image is None:
        capacity = EMPTY
    if capacity is not None:
        arguments += ["--capacity", str(capacity)]
    if image is not None:
        arguments += ["--image", os.fspath(image)]
    try:
        said = _run([*arguments, *(os.fspath(model) for model in models), where], undone_by=["umount", where])
    except BaseException:
        if made is not None:
            # The first error is the one that is told.
            with contextlib.suppress(OSError):
                os.rmdir(made)
        raise
    try:
        device = open(where, api=json.loads(said)["api"])
    except BaseException as why:
        try:
            _unmount(where, made)
        except OSError as also:
            why.add_note(f"and {where} stays: {also}")
        raise
    device._mounted, device._made = where, made
    return device


def _numbers(of: Any) -> tuple[int, ...]:
    """Whole numbers, of whatever kind: one or several."""
    try:
        return (operator.index(of),)
    except TypeError:
        return tuple(operator.index(one) for one in of)


def _laid_out(kv: tuple[int, int] | None) -> str:
    return "in the order of addresses" if kv is None else f"rows of {kv[0]} channels in windows of {kv[1]} tokens"


def _unmount(where: str, made: str | None) -> None:
    """Takes down the device mounted on ``where``, and removes the directory that was made for it."""
    _run(["umount", where])
    if made is not None:
        os.rmdir(made)


def _program() -> str:
    program = os.environ.get("LAMINA") or shutil.which("lamina")
    if program is None:
        raise LaminaError(
            "the program `lamina` is not on the path: build it with `cargo install --path device/lamina`, or set LAMINA to it"
        )
    return program


def _run(arguments: list[str], undone_by: list[str] | None = None) -> str:
    """What the program prints.

    If this is interrupted the program is told to end, and is waited for. If it was done by then, ``undone_by`` is run.
    """
    command = [_program(), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            said, wrong = running.communicate()
        except BaseException:
            running.terminate()
            running.communicate()
            if running.returncode == 0 and undone_by is not None:
                with contextlib.suppress(OSError):
                    _run(undone_by)
            raise
    if running.returncode != 0:
        raise LaminaError(wrong.strip() or f"`lamina {arguments[0]}` ended with {running.returncode}")
    return said


def _api_of(path: str) -> str:
    try:
        return os.getxattr(path, "user.lamina.api").decode()
    except OSError as why:
        raise LaminaError(f"{path} does not say where its API is ({why.strerror}): pass api=, the path of api.sock") from why
