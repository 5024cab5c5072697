import os
import shutil

import pytest

import lamina


@pytest.fixture
def program():
    """The program `lamina`, without which no device can be started."""
    found = os.environ.get("LAMINA") or shutil.which("lamina")
    if found is None:
        pytest.skip("no program `lamina`: set LAMINA to it")
    if not os.path.exists("/dev/fuse"):
        pytest.skip("no /dev/fuse")
    return found


@pytest.fixture
def device(program):
    with lamina.mount() as device:
        yield device
