"""The installed package: usable from every folder, with trainers and configurations."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests import ROOT


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone holds that is called as git calls it: tfpar."""
    clone = tmp_path_factory.mktemp("above") / "tfpar"
    clone.mkdir()
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    for name in ("tfpar", "trainers", "configs"):
        shutil.copytree(ROOT / name, clone / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    return clone


@pytest.fixture(scope="module")
def wheels(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """A wheel of the clone, and one by way of a source distribution (True); unpacked."""
    folder = tmp_path_factory.mktemp("wheels")
    call_backend(clone, "sdist", folder / "sdist")
    (archive,) = (folder / "sdist").glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    unpacked = folder / archive.name.removesuffix(".tar.gz")
    return {False: build(clone, "wheel", folder / "of_clone"), True: build(unpacked, "wheel", folder / "of_sdist")}


def call_backend(source: Path, kind: str, folder: Path) -> None:
    """Build a wheel, an editable one or a source distribution into a new folder, as pip and build do."""
    folder.mkdir()
    program = f"import setuptools.build_meta as backend; backend.build_{kind}({str(folder)!r})"
    built = subprocess.run([sys.executable, "-c", program], cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr


def build(clone: Path, kind: str, folder: Path) -> Path:
    """Build what pip builds of a clone, and unpack it as pip does into site-packages."""
    call_backend(clone, kind, folder)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site-packages")
    return folder / "site-packages"


def run(code: str, folder: Path, site_packages: Path) -> str:
    """Run a script in a folder, with only these packages installed, and return its output."""
    script = folder / "script.py"
    script.write_text(f"import site; site.addsitedir({str(site_packages)!r})\n{code}")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    completed = subprocess.run(
        [sys.executable, "-S", str(script)],  # -S: without the packages that this Python has installed
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.strip()


def test_a_script_in_the_folder_above_a_clone_imports_the_package_and_not_the_clone(
    clone: Path, tmp_path: Path
) -> None:
    """The clone has the package's name, and a folder without `__init__.py` is a namespace package to Python."""
    site_packages = build(clone, "editable", tmp_path / "editable")
    code = "import tfpar, tfpar.trainers; print(tfpar.__file__, tfpar.trainers.__file__)"
    found = run(code, clone.parent, site_packages)
    assert found.split() == [str(clone / "tfpar" / path) for path in ("__init__.py", "trainers/__init__.py")]


@pytest.mark.parametrize("through_source_distribution", [False, True], ids=["of_a_clone", "of_a_source_distribution"])
def test_a_wheel_holds_one_package_with_its_trainers_and_configurations(
    wheels: dict[bool, Path], through_source_distribution: bool
) -> None:
    """`pip install .` builds it of the clone, `python -m build` of a source distribution."""
    site_packages = wheels[through_source_distribution]
    assert sorted(path.name for path in site_packages.iterdir() if path.suffix != ".dist-info") == ["tfpar"]
    for folder, pattern in ("configs", "*.toml"), ("trainers", "*.py"):
        installed = {path.name: path.read_bytes() for path in (site_packages / "tfpar" / folder).iterdir()}
        assert installed == {path.name: path.read_bytes() for path in (ROOT / folder).glob(pattern)}
    assert (site_packages / "tfpar" / "py.typed").exists(), "type checkers would not read the annotations"
    modules = {path.relative_to(site_packages) for path in site_packages.rglob("*.py")}
    assert modules >= {path.relative_to(ROOT) for path in (ROOT / "tfpar").rglob("*.py")}


@pytest.mark.slow_start
def test_an_installed_wheel_trains_from_an_empty_folder(wheels: dict[bool, Path], tmp_path: Path) -> None:
    """`tfpar-train`, found without the clone; packages that the documentation names need no import of their own."""
    site_packages, folder = wheels[False], tmp_path / "empty"
    folder.mkdir()
    program = (
        "import importlib.metadata, sys; sys.argv[0] = 'tfpar-train'; "
        "(command,) = importlib.metadata.entry_points(group='console_scripts', name='tfpar-train'); "
        "import tfpar; assert all([tfpar.config.load, tfpar.pipeline.schedule.make, tfpar.checkpoint.Position]); "
        "import tfpar.trainers; print(tfpar.__file__, tfpar.trainers.__file__, flush=True); command.load()()"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    environment["PYTHONPATH"] = str(site_packages)
    arguments = ["--config", "regression_small", "--set", "data.num_examples=2048", "--directory", "run"]
    completed = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    found = completed.stdout.splitlines()[0].split()
    assert found == [str(site_packages / "tfpar" / path) for path in ("__init__.py", "trainers/__init__.py")]
    assert (folder / "run" / "model.keras").is_file()
