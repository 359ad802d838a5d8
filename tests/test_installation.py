"""What installing leaves: packages that are found from every folder, and configurations inside a wheel."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(path.name for path in (ROOT / "configs").glob("*.toml"))


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


def build(clone: Path, kind: str, folder: Path) -> Path:
    """Build what pip builds of a clone, and unpack it as pip does into site-packages."""
    folder.mkdir()
    program = f"import setuptools.build_meta as backend; backend.build_{kind}({str(folder)!r})"
    built = subprocess.run([sys.executable, "-c", program], cwd=clone, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site-packages")
    return folder / "site-packages"


def run(code: str, folder: Path, site_packages: Path) -> str:
    """Run a script that lies in a folder, where only these packages are installed, and return what it prints."""
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
    (clone.parent / "trainers").mkdir()
    site_packages = build(clone, "editable", tmp_path / "editable")
    found = run(
        "import tfpar, trainers; print(tfpar.__file__, trainers.__file__)", clone.parent, site_packages
    )  # fmt: skip
    assert found.split() == [str(clone / name / "__init__.py") for name in ("tfpar", "trainers")]


def test_a_wheel_holds_the_packages_and_the_configurations_and_nothing_else(clone: Path, tmp_path: Path) -> None:
    site_packages = build(clone, "wheel", tmp_path / "wheel")
    assert sorted(path.name for path in site_packages.iterdir() if path.suffix != ".dist-info") == ["tfpar", "trainers"]
    assert sorted(path.name for path in (site_packages / "tfpar" / "configs").iterdir()) == CONFIGS
    assert (site_packages / "tfpar" / "py.typed").exists(), "type checkers would not read the annotations"
