"""What tells a device what the bytes of a pool are."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from typing import Any

from ._control import HostControl, LaminaError

#: What the tensor is called that says what a pool's part of the base window holds; where it begins
#: is behind it.
_TENSOR = "pool@"


class Declaration:
    """What tells the device what the bytes of a pool's file are, as the pool is made."""

    def __init__(self, path: str | os.PathLike[str], format: str | None, kv: tuple[int, int] | None) -> None:
        # Where it is in truth: the mount, or the file, may be behind a symbolic link.
        self._path = os.path.realpath(path)
        self._format = format or "bf16"
        self._kv = None if kv is None else (operator.index(kv[0]), operator.index(kv[1]))
        self._is_made = False
        root = os.path.dirname(self._path)
        while not os.path.ismount(root):
            root = os.path.dirname(root)
        try:
            self._control = HostControl(os.getxattr(root, "user.lamina.api").decode())
        except OSError:
            raise LaminaError(
                f"{self._path} is not in a mount of a device, so nothing codes its bytes: leave format and kv out"
            ) from None
        relative = os.path.relpath(self._path, root)
        self._is_base = relative == "base"
        if not self._is_base and relative.split(os.sep)[0] != "files":
            raise LaminaError(f"{relative} of the mount {root} cannot hold a pool: base can, and files in files/")

    def __call__(self, start: int, end: int) -> None:
        self._is_made = True
        if self._is_base:
            self._of_base(start, end)
            return
        try:
            for name, value in self._attributes().items():
                os.setxattr(self._path, name, value)
        except OSError as why:
            raise LaminaError(f"{self._path} cannot be coded as {self._spelled()}: {why.strerror}") from why

    def _attributes(self) -> dict[str, bytes]:
        found = {"user.lamina.format": self._format.encode()}
        if self._kv is not None:
            found["user.lamina.kv"] = f"{self._kv[0]},{self._kv[1]}".encode()
        return found

    def _layout(self) -> dict[str, Any] | None:
        return None if self._kv is None else {"kind": "kv", "channels": self._kv[0], "window": self._kv[1]}

    def _of_base(self, start: int, end: int) -> None:
        name = f"{_TENSOR}{start:#x}"
        spec: dict[str, Any] = {"name": name, "dpa": start, "length": end - start, "format": self._format}
        layout = self._layout()
        if layout is not None:
            spec["layout"] = layout
        if any(tensor["name"] == name for tensor in self._control.tensors()):
            self._control.remove(name)
        self._control.create(spec)

    def _spelled(self) -> str:
        return self._format if self._kv is None else f"{self._format} with a KV cache's rows {self._kv}"

    def is_own(self, data: Callable[[], int]) -> bool:
        """Whether the pool was made to be coded so: by this call, or by another before.

        ``data`` says how many bytes of it are for objects.
        """
        if self._is_made:
            return True
        if self._is_base:
            wanted = {"kind": "weight"} if self._kv is None else self._layout()
            own = [tensor for tensor in self._control.tensors() if tensor["name"].startswith(_TENSOR)]
            same = [each for each in own if each["format"] == self._format and each["layout"] == wanted]
            # Chunks of a class of their own have such tensors, too.
            return bool(same) and any(tensor["length"] == data() for tensor in same)
        return all(_attribute(self._path, name) == value for name, value in self._attributes().items())

    def verify(self, data: Callable[[], int]) -> None:
        """Refuses a pool that another made otherwise: it would not be coded as this process wants."""
        if not self.is_own(data):
            raise LaminaError(f"the pool in {self._path} is there, and was not made to be coded as {self._spelled()}")


def _attribute(path: str, name: str) -> bytes | None:
    try:
        return os.getxattr(path, name)
    except OSError:
        return None
