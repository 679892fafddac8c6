"""The tests of the native kernels with AddressSanitizer and UBSan compiled in.

`make test ARGS="-m sanitizers"`; some minutes, most of them of the compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/compute/native",
    "tests/compute/test_sampling_properties.py",
    # Whole steps: either KV cache, pages that several sequences share, 1 to 4 threads.
    "tests/engine/test_invariance_matrix.py::test_every_way_to_the_same_tokens",
    # ggml's K types, and activations in 8 bits.
    "tests/engine/test_invariance_matrix.py::test_block_types_and_bits_of_activations",
)
# AddressSanitizer's allocator may be locked by the thread that computes at the moment of a fork,
# and stays so in the child.
LEFT_OUT = "tests/compute/native/test_thread_pool.py::test_a_fork_in_the_middle_of_steps"

OVERRUN = """
import numpy as np
from trimaran.compute.native import _native

def test_overrun() -> None:
    rows = np.ones((1, 1, 64), np.float32)
    cache = np.zeros((2, 1, 32, 16, 2), np.uint16)
    values = np.zeros((2, 1, 8, 64, 2), np.uint16)
    zero, outside = np.zeros(1, np.int32), np.full(1, 2 * 16, np.int32)
    _native.attend("portable", 1, rows, rows, rows, cache, values, zero, outside,
                   np.array([0, 1], np.int32), zero + 1, np.zeros((1, 1), np.int32), 1.0,
                   np.empty_like(rows), None)
"""

CAPTURE = "--capture=sys"  # the sanitizers write to the file itself, and then end the process

pytestmark = [pytest.mark.sanitizers, pytest.mark.timeout(3600)]


def tool(name: str) -> str:
    """A program of the environment that runs the tests, or of the system."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert found is not None, f"{name} is needed: pip install {name}"
    return found


def runtime_library(name: str) -> str:
    """The path of a library of the compiler that the extension is built with."""
    compiler = os.environ.get("CXX", "c++")
    path = subprocess.run(
        [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert Path(path).is_absolute(), f"{compiler} has no {name}"
    return path


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build")
    ninja = tool("ninja")
    configure = [tool("cmake"), "-S", ROOT, "-B", folder, "-G", "Ninja"]
    configure += [f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DPython_EXECUTABLE={sys.executable}"]
    configure += ["-DTRIMARAN_SANITIZE=address;undefined"]
    for command in (configure, [ninja, "-C", folder]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return next(folder.glob("_native*.so"))


def run(extension: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest on the sanitized extension. Python itself leaks by design, so leaks aren't
    looked for; libstdc++ must be there before a first exception is thrown."""
    environment = os.environ | {
        "LD_PRELOAD": f"{runtime_library('libasan.so')}:{runtime_library('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    }
    return subprocess.run(
        [sys.executable, "tests/sanitizers/kernel_tests.py", str(extension), *arguments, CAPTURE],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_nothing_is_found(extension: Path) -> None:
    options = ("-q", "-x", "-p", "no:cacheprovider", "--timeout=1200", f"--deselect={LEFT_OUT}")
    done = run(extension, *options, *TESTS)
    report = done.stdout[-4000:] + done.stderr[-8000:]
    assert done.returncode == 0, report
    assert "runtime error" not in done.stderr, report


def test_the_sanitizers_are_at_work(extension: Path, tmp_path: Path) -> None:
    """What the engine checks and this doesn't: a slot just outside the cache."""
    program = tmp_path / "test_overrun.py"
    program.write_text(OVERRUN, encoding="utf-8")
    done = run(extension, "-q", "-p", "no:cacheprovider", str(program))
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
