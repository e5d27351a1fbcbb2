"""Recipes, citation and wheel agree with ``setup.cfg``."""

from __future__ import annotations

import configparser
import re
import shutil
import sys
from pathlib import Path

import pytest

from mpitrain.version import __version__

from ..support.launch import LAUNCHER_ENVIRONMENT, ROOT, run

SPACK = ROOT / "packaging/spack/spack_repo/mpitrain/packages/py_mpitrain/package.py"
CONDA = ROOT / "packaging/conda-forge/recipe.yaml"
NAMES_OF_CONDA = {"docstring_parser": "docstring-parser", "python-xxhash": "xxhash"}


def required(extra: str = "") -> dict[str, str]:
    """Return the names and lowest versions of the packages that ``setup.cfg`` requires, or that an extra requires."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options.extras_require"][extra] if extra else config["options"]["install_requires"]
    return dict(re.findall(r"^([\w-]+)\s*>=\s*([\d.]+)", lines, re.MULTILINE))


def test_the_recipe_for_conda_forge() -> None:
    text = CONDA.read_text().partition("\n  run:\n")[2].partition("\n\n")[0]
    listed = dict(re.findall(r"^    - ([\w-]+) >=([\d.]+)", text, re.MULTILINE))
    assert {NAMES_OF_CONDA.get(name, name): version for name, version in listed.items()} == required()


def test_the_recipe_for_spack() -> None:
    listed = re.findall(r'depends_on\("py-([\w-]+)@([\d.]+):"(?:, when="([^"]*)")?', SPACK.read_text())
    always = {name: version for name, version, when in listed if not when or when.startswith("^python")}
    assert always == {**required(), "setuptools": "68"}
    for extra in ("torch", "report"):
        assert {name: version for name, version, when in listed if when == f"+{extra}"} == required(extra)
    compile(SPACK.read_text(), str(SPACK), "exec")


@pytest.mark.parametrize("path", [CONDA, SPACK, ROOT / "CITATION.cff", ROOT / "packaging/apptainer/mpitrain.def"])
def test_recipes_name_this_version(path: Path) -> None:
    assert set(re.findall(r"\b\d+\.\d+\.\d+\b(?=\"|-py3|\n)", path.read_text())) - {"1.2.0"} == {__version__}


@pytest.mark.full
def test_a_wheel_needs_no_checkout(tmp_path: Path) -> None:
    """A package installed from a wheel is complete, trains, and writes a project."""
    source, target, empty = tmp_path / "source", tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    shutil.copytree(ROOT / "mpitrain", source / "mpitrain", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "mpitrain_torch.py"):
        shutil.copy(ROOT / name, source)
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(source)]
    done = run([sys.executable, *install], timeout=180)
    assert done.returncode == 0, done.stderr
    env = {**LAUNCHER_ENVIRONMENT, "PYTHONPATH": str(target)}
    where = run([sys.executable, "-c", "import mpitrain; print(mpitrain.__file__)"], env=env, cwd=empty)
    assert Path(where.stdout.strip()).is_relative_to(target)
    for words in (["demo", "--train-steps", "20"], ["init", "project"], ["report"]):
        done = run([sys.executable, "-m", "mpitrain", *words], timeout=180, env=env, cwd=empty)
        assert done.returncode == 0, done.stderr
    installed = {path.relative_to(target / "mpitrain") for path in (target / "mpitrain").rglob("*") if path.is_file()}
    there = {path.relative_to(ROOT / "mpitrain") for path in (ROOT / "mpitrain").rglob("*") if path.is_file()}
    assert {path for path in there - installed if "__pycache__" not in path.parts} == set()
