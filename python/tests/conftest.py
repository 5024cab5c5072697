import os
import shutil
import subprocess

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


@pytest.fixture
def mounted(program, tmp_path):
    """A device with `files/`."""
    where = tmp_path / "mounted"
    environment = dict(os.environ, XDG_RUNTIME_DIR=str(tmp_path))
    subprocess.run([program, "mount", "--files", "1G", where], env=environment, check=True, capture_output=True, timeout=60)
    yield where
    subprocess.run([program, "umount", where], env=environment, check=True, capture_output=True, timeout=60)


@pytest.fixture
def divided(program, tmp_path):
    """A device of three partitions: two guests' and one that is everybody's. Where it is mounted."""
    where, run = tmp_path / "mounted", tmp_path / "run"
    run.mkdir(mode=0o700)
    arguments = ["serve", "--json", "--mount", where, "--run-dir", run, "--shared", "64M"]
    for guest in ("small=64M", "large=128M"):
        arguments += ["--guest", guest]
    with subprocess.Popen([program, *arguments], stdout=subprocess.PIPE, text=True) as serving:
        try:
            assert '"ready":true' in serving.stdout.readline()
            yield where
        finally:
            serving.terminate()
