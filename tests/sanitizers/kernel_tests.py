"""A program: pytest, with another build of the extension module in place of the installed one.

python kernel_tests.py path/to/_native.so [arguments of pytest]
"""

from __future__ import annotations

import importlib.util
import sys

import pytest

NAME = "trimaran.compute.native._native"


def main() -> int:
    path, *arguments = sys.argv[1:]
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])
    return int(pytest.main(arguments))


if __name__ == "__main__":
    sys.exit(main())
