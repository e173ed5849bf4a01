"""What is installed, and what an import does."""

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The wheel of a copy of the checkout (building leaves files beside the sources)."""
    pytest.importorskip("setuptools")
    source, target = tmp_path_factory.mktemp("source") / "project", tmp_path_factory.mktemp("wheel")
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    for name in ("ligermodels", "kernels", "checkpoints_convert"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    build = (
        "import os, sys; from setuptools import build_meta; os.chdir(sys.argv[1]); build_meta.build_wheel(sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", build, source, target], check=True, capture_output=True, text=True)
    return zipfile.ZipFile(next(target.glob("*.whl")))


def test_the_wheel_holds_one_package_and_not_the_name_kernels(wheel):
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert {name for name in top if not name.endswith(".dist-info")} == {"ligermodels"}


def test_the_wheel_holds_every_module_of_the_checkout(wheel):
    modules = {
        prefix + str(path.relative_to(ROOT / folder))
        for folder, prefix in {
            "ligermodels": "ligermodels/",
            "kernels": "ligermodels/kernels/",
            "checkpoints_convert": "ligermodels/checkpoints_convert/",
        }.items()
        for path in (ROOT / folder).rglob("*.py")
        if "__pycache__" not in path.parts
    }
    assert {"ligermodels/kernels/_dispatch.py", "ligermodels/checkpoints_convert/hf.py"} <= modules
    assert {name for name in wheel.namelist() if name.endswith(".py")} == modules


def imported(path: Path) -> set[str]:
    """The modules of this project, and those of torch, that a file imports anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.startswith(("ligermodels", "kernels", "torch.nn", "transformers"))}


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("kernels", ("ligermodels.errors.", "ligermodels.kernels.", "torch.nn.functional")),
        ("checkpoints_convert", ("ligermodels.errors.", "ligermodels.checkpoints_convert.")),
    ],
)
def test_imports_point_one_way(folder, allowed):
    """Kernels know nothing of models or files, checkpoints no module. One exception: only the families know what a
    config's absent keys mean, so a conversion to a layout that has no defaults asks them."""
    found = {(path.name, name) for path in (ROOT / folder).glob("*.py") for name in imported(path)}
    found -= {("convert.py", "ligermodels.MODELS")}
    assert found and {pair for pair in found if not pair[1].startswith(allowed)} == set()


def test_the_checkout_finds_both_packages_through_links():
    assert os.readlink(ROOT / "ligermodels" / "kernels") == "../kernels"
    assert os.readlink(ROOT / "ligermodels" / "checkpoints_convert") == "../checkpoints_convert"


IMPORT = """
import sys, time
import torch
torch_alone = time.process_time()
import ligermodels
heavy = {"transformers", "gguf", "matplotlib", "kernels", "huggingface_hub", "jinja2", "typer", "PIL", "tensorboard"}
heavy = sorted(heavy & set(sys.modules))
print(time.process_time(), torch_alone, torch.cuda.is_initialized(), heavy)
"""


def test_import_from_a_bare_checkout_is_quick_and_light():
    """Not installed, and no variable set but the path. Processor time, as the machine may be busy; where torch alone
    takes most of the three seconds, ours may add one."""
    environment = {"PYTHONPATH": ".", "PATH": os.environ["PATH"]}
    command = [sys.executable, "-c", IMPORT]
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=environment).stdout
    seconds, torch_alone, initialised, heavy = output.split(maxsplit=3)
    assert (initialised, heavy.strip()) == ("False", "[]")
    assert float(seconds) < max(3.0, float(torch_alone) + 1.0)
