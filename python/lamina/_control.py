"""Requests to a device: over the socket of its API on a host, over the control port in a guest."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import time
from typing import Any, Protocol
from urllib.parse import quote

from . import _lamina

#: How long a request may take, in seconds. A flush of many dirty pages is the slowest that has an
#: end.
TIMEOUT = 60.0
#: How often, and after how many seconds, a question is asked again while the device's worker is
#: replaced.
AGAIN = (20, 0.05)


class LaminaError(OSError):
    """The device refuses something, or nobody answers."""


class Control(Protocol):
    """What a device can be asked besides loads and stores."""

    def tensors(self) -> list[dict[str, Any]]: ...
    def views(self) -> list[dict[str, Any]]: ...
    def create(self, spec: dict[str, Any]) -> None: ...
    def remove(self, name: str) -> None: ...
    def detach(self, name: str) -> None: ...
    def create_view(self, tensor: str, spelling: str) -> None: ...
    def remove_view(self, tensor: str, spelling: str) -> None: ...
    def flush(self, offset: int, length: int) -> None: ...
    def stats(self) -> dict[str, Any]: ...


class _Connection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float | None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class HostControl:
    """The API of a device on this host."""

    def __init__(self, api: str) -> None:
        self.api = api

    def ask(self, method: str, path: str, body: Any = None, timeout: float | None = TIMEOUT) -> Any:
        """One request. Questions are asked again if the device's worker is replaced meanwhile."""
        left = AGAIN[0] if method == "GET" else 0
        while True:
            try:
                return self._ask(method, path, body, timeout)
            except (http.client.HTTPException, ConnectionResetError, BrokenPipeError) as why:
                if left == 0:
                    raise LaminaError(f"the device's answer broke off ({why}); is its process still there?") from why
            except (ConnectionError, FileNotFoundError, TimeoutError) as why:
                raise LaminaError(f"no device answers at {self.api}: {why}. Is it still mounted? `lamina ls` tells") from why
            left -= 1
            time.sleep(AGAIN[1])

    def _ask(self, method: str, path: str, body: Any, timeout: float | None) -> Any:
        connection = _Connection(self.api, timeout)
        try:
            data = None if body is None else json.dumps(body)
            # What is too large is refused before all of it is taken: the answer is there then.
            with contextlib.suppress(BrokenPipeError):
                connection.request(method, path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        try:
            found = json.loads(text) if text else {}
        except ValueError as why:
            raise LaminaError(f"what answers at {self.api} is no Lamina device: {text[:80]!r}") from why
        if answer.status >= 300:
            raise LaminaError(f"the device refuses: {found.get('error', answer.reason)}")
        return found

    def port_of(self, base: str) -> str | None:
        """The control port of the partition whose base window is this file; none if the device is undivided.

        A partition's windows have offsets and names of their own, which are not those of the API.
        """
        exports = _rows(self.ask("GET", "/guests"), "exports")
        if all(export["kind"] != "guest" for export in exports):
            return None
        for export in exports:
            with contextlib.suppress(OSError):
                if os.path.samefile(export["base"]["path"], base):
                    return str(export["ctl"])
        raise LaminaError(f"{base} is no window of the device at {self.api}: `lamina ls` tells which devices there are")

    def tensors(self) -> list[dict[str, Any]]:
        return _rows(self.ask("GET", "/tensors"), "tensors")

    def views(self) -> list[dict[str, Any]]:
        return _rows(self.ask("GET", "/views"), "views")

    def create(self, spec: dict[str, Any]) -> None:
        self.ask("POST", "/tensors", spec)

    def remove(self, name: str) -> None:
        self.ask("DELETE", "/tensors/" + quote(name))

    def detach(self, name: str) -> None:
        self.ask("POST", "/detach", {"tensor": name}, timeout=None)  # it takes as long as the tensor is large

    def create_view(self, tensor: str, spelling: str) -> None:
        self.ask("POST", "/views", {"tensor": tensor, "spelling": spelling})

    def remove_view(self, tensor: str, spelling: str) -> None:
        self.ask("DELETE", "/views", {"tensor": tensor, "spelling": spelling})

    def flush(self, offset: int, length: int) -> None:
        self.ask("POST", "/flush", {"offset": offset, "length": length})

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", "/stats")
        return found


class GuestControl:
    """The control port of a guest, and the directory in its memory."""

    #: Entries that the port lists at a time.
    PAGE = 1000

    def __init__(self, device: _lamina.Device) -> None:
        self._device = device

    def _request(self, op: str, **fields: Any) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._device.request(json.dumps({"op": op, **fields})))
        except OSError as why:
            raise LaminaError(str(why)) from why
        return found

    def _listed(self, what: str, at: str) -> list[dict[str, Any]]:
        directory = json.loads(self._device.directory())
        if not directory["is_incomplete"]:
            found: list[dict[str, Any]] = directory[what]
            return found
        found, start = [], 0
        while True:
            page = _rows(self._request(what, **{"from": start, "most": self.PAGE}), what)
            found.extend(page)
            if len(page) < self.PAGE:
                return found
            start = page[-1][at] + 1

    def tensors(self) -> list[dict[str, Any]]:
        return self._listed("tensors", "dpa")

    def views(self) -> list[dict[str, Any]]:
        return self._listed("views", "offset")

    def create(self, spec: dict[str, Any]) -> None:
        self._request("create_tensors", tensors=[spec])

    def remove(self, name: str) -> None:
        self._request("remove_tensor", name=name)

    def detach(self, name: str) -> None:
        self._request("detach_tensor", name=name)

    def create_view(self, tensor: str, spelling: str) -> None:
        self._request("view", tensor=tensor, spelling=spelling)

    def remove_view(self, tensor: str, spelling: str) -> None:
        self._request("remove_view", tensor=tensor, spelling=spelling)

    def flush(self, offset: int, length: int) -> None:
        self._request("flush", offset=offset, length=length)

    def stats(self) -> dict[str, Any]:
        found = self._request("stats")
        return dict(found.get("stats", found))


class PortControl(GuestControl):
    """The control port of a partition, asked on the host."""

    def __init__(self, device: _lamina.Device, port: str) -> None:
        super().__init__(device)
        self._port = port

    def _request(self, op: str, **fields: Any) -> dict[str, Any]:
        # Detaching takes as long as the tensor is large.
        timeout = None if op == "detach_tensor" else TIMEOUT
        left = AGAIN[0] if op in ("tensors", "views", "stats") else 0
        while True:
            line = self._exchange(json.dumps({"op": op, **fields}), timeout)
            if line.endswith(b"\n"):
                break
            if left == 0:
                raise LaminaError("the device's answer broke off; is its process still there?")
            left -= 1
            time.sleep(AGAIN[1])
        found: dict[str, Any] = json.loads(line)
        if not found.get("ok"):
            raise LaminaError(f"the device refuses: {found.get('error')}")
        return found

    def _exchange(self, request: str, timeout: float | None) -> bytes:
        """The line that answers a request; what came of it if the device's worker went meanwhile."""
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as port:
                port.settimeout(timeout)
                port.connect(self._port)
                try:
                    port.sendall(request.encode() + b"\n")
                    with port.makefile("rb") as answers:
                        return answers.readline()
                except (ConnectionResetError, BrokenPipeError):
                    return b""
        except OSError as why:
            raise LaminaError(f"no device answers at {self._port}: {why}. Is it still mounted? `lamina ls` tells") from why


def _rows(found: Any, what: str) -> list[dict[str, Any]]:
    rows = found.get(what) if isinstance(found, dict) else found
    if not isinstance(rows, list):
        raise LaminaError(f"the device's list of {what} is none: {str(found)[:80]}")
    return rows
