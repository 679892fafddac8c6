"""The floors: a package imports only from those below it, never from one beside it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("core", "cache", "models", "schedule", "compute", "engine", "serve", "simulate", "cli")
FORBIDDEN = [
    ("core", "cache"),
    ("cache", "models"),
    ("models", "cache"),
    ("schedule", "compute"),
    ("compute", "schedule"),
    ("compute", "engine"),
    ("engine", "serve"),
    ("serve", "simulate"),
    ("simulate", "serve"),
    ("serve", "cli"),
]


def lint(config: Path, source: Path) -> subprocess.CompletedProcess[str]:
    """import-linter's verdict over the packages in `source`."""
    script = (
        "import sys; from importlinter.cli import lint_imports;"
        " sys.exit(lint_imports(config_filename=sys.argv[1], no_cache=True, no_logo=True))"
    )
    return subprocess.run(
        [sys.executable, "-c", script, str(config)],
        cwd=source,
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
    )


def write_house(folder: Path, imports: Iterable[tuple[str, str]] = ()) -> Path:
    """Packages with the names of ours and these imports, under another root; its contract."""
    for package in ("", *PACKAGES):
        (folder / "house" / package).mkdir()
        (folder / "house" / package / "__init__.py").touch()
    for package, imported in imports:
        module = folder / "house" / package / f"with_{imported}.py"
        module.write_text(f"import house.{imported}\n")
    (folder / "house" / "__main__.py").touch()
    config = folder / "pyproject.toml"
    config.write_text((ROOT / "pyproject.toml").read_text().replace('"trimaran', '"house'))
    return config


def test_every_package_imports_only_from_below() -> None:
    done = lint(ROOT / "pyproject.toml", ROOT / "src")
    assert done.returncode == 0, done.stdout
    assert "floors KEPT" in done.stdout
    assert "one clock KEPT" in done.stdout


def test_the_contract_finds_each_breach(tmp_path: Path) -> None:
    done = lint(write_house(tmp_path, FORBIDDEN), tmp_path)
    assert done.returncode == 1
    for lower, upper in FORBIDDEN:
        assert f"house.{lower} is not allowed to import house.{upper}" in done.stdout


def test_the_contract_allows_what_is_below(tmp_path: Path) -> None:
    allowed = [("cli", "serve"), ("serve", "engine"), ("engine", "schedule"), ("schedule", "cache")]
    done = lint(write_house(tmp_path, [*allowed, ("compute", "models")]), tmp_path)
    assert done.returncode == 0, done.stdout


def test_the_contract_finds_another_clock(tmp_path: Path) -> None:
    config = write_house(tmp_path)
    (tmp_path / "house" / "schedule" / "watch.py").write_text("from time import monotonic\n")
    done = lint(config, tmp_path)
    assert done.returncode == 1
    assert "house.schedule.watch -> time" in done.stdout


def test_the_contract_knows_every_package(tmp_path: Path) -> None:
    config = write_house(tmp_path)
    (tmp_path / "house" / "cellar").mkdir()
    (tmp_path / "house" / "cellar" / "__init__.py").touch()
    done = lint(config, tmp_path)
    assert done.returncode == 1
    assert "cellar" in done.stdout
