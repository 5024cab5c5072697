"""The package in a guest: the same calls on the guest's own CXL memory."""

import importlib.metadata
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import lamina

#: The Python of the larger guest, Debian trixie's.
GUEST_PYTHON = "3.13"
#: What the script ends with where all was right: a status that nothing else gives.
RIGHT = 7
SCRIPT = f"""#!/bin/sh
lamina-shim up || exit 1
mkdir /packages && tar -xf /packages.tar -C /packages || exit 1
PYTHONPATH=/packages python3 /in_guest.py || exit 1
exit {RIGHT}
"""


def packages(folder):
    """The package as it is here, and ml_dtypes for the guest's Python, as one archive."""
    version = importlib.metadata.version("ml_dtypes")
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    words += ["--only-binary", ":all:", "--python-version", GUEST_PYTHON, "--dest", str(folder), f"ml_dtypes=={version}"]
    subprocess.run(words, check=True, timeout=300)
    (wheel,) = folder.glob("ml_dtypes-*.whl")
    with zipfile.ZipFile(wheel) as unpacked:
        unpacked.extractall(folder / "wheel")
    archive = folder / "packages.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(Path(lamina.__file__).parent, "lamina")
        tar.add(folder / "wheel/ml_dtypes", "ml_dtypes")
    return archive


def test_a_guest_has_its_memory_as_arrays(program, tmp_path):
    root = os.environ.get("LAMINA_ROOT")
    if root is None:
        pytest.skip("the guest is made by the repository's recipes: start the tests by ./x test --clients")
    script = tmp_path / "script.sh"
    script.write_text(SCRIPT)
    model = Path(root, "guest-tests/models/stories260K-bf16.safetensors")
    words = [program, "boot", "--python", "--model", model, "--run-dir", tmp_path / "run", "--script", script]
    for source, inside in ((packages(tmp_path), "/packages.tar"), (Path(__file__).with_name("in_guest.py"), "/in_guest.py")):
        words += ["--put", f"{source}={inside}"]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900)
    assert done.returncode == RIGHT, done.stdout
    assert "tensors 47" in done.stdout.splitlines()
