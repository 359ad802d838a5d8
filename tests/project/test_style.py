"""The house rules that a machine can check: style, types, the ladder of imports."""

import ast
import configparser
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT

# What .pre-commit-config.yaml runs, too.
COMMANDS = [["ruff", "check"], ["ruff", "format", "--check"], ["mypy"]]
# A module imports from the packages on its own rung or on those above it. A sub-package has a separate place.
LADDER = [
    [
        "_compat",
        "files",
        "full_precision",
        "host_sizes",
        "kernels",
        "layout",
        "messages",
        "per_model",
        "process_lock",
        "pipeline.schedule",
    ],
    ["placement", "recomputation"],
    ["callbacks", "commands", "config", "data.batching"],
    ["__main__", "cluster", "data.sharding"],
    ["cluster.rendezvous", "data.sources", "job", "launcher"],
    ["data", "launch", "xla_choice"],
    ["pipeline.graph", "reduction"],
    ["study"],
    ["checkpoint", "pipeline.partition"],
    ["sharding"],
    ["pipeline.stages"],
    ["pipeline.loss"],
    ["pipeline.execution"],
    ["pipeline.analysis"],
    ["workers"],
    ["engines.steps"],
    ["engines"],
    ["engines.replicas", "engines.stages"],
    ["engines.workers"],
    ["strategies"],
    ["strategies.factory", "strategies.resolve"],
    ["interruption", "loops"],
    ["comparable", "trainer"],
    ["drop_in", "parity", "planning"],
    ["reports"],
    ["report", "runs"],
    ["checks", "plan", "train"],
    ["doctor"],
]
RUNG = {module: rung for rung, modules in enumerate(LADDER) for module in modules}


def python_files(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def package_of(name: str) -> str:
    """The longest beginning of a dotted name below tfpar that has a rung; a name of `tfpar` itself gives `__init__`."""
    parts = name.split(".")
    beginnings = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((beginning for beginning in beginnings if beginning in RUNG), "__init__")


def module_of(path: Path) -> str:
    """The dotted name of a file below tfpar: `data.sources.digits`; a package gives the name of its folder."""
    parts = path.relative_to(ROOT / "tfpar").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, anywhere in it, as absolute names; `from a import b` gives `a.b`."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += [node.module] if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)


def imported_packages(path: Path) -> set[str]:
    """Packages and modules of the ladder that a file imports."""
    return {package_of(name.removeprefix("tfpar.")) for name in imports(path) if name.startswith("tfpar.")}


# They hand on names of packages inside of them.
FACES = ["tfpar/__init__.py", "tfpar/strategies/__init__.py", "tfpar/pipeline/__init__.py"]
MODULES = [path for path in python_files("tfpar") if str(path.relative_to(ROOT)) not in FACES]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_no_tool_complains(command: list[str]) -> None:
    completed = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, f"{' '.join(command)}:\n{completed.stdout}{completed.stderr}"


def test_every_module_has_a_rung_on_the_ladder() -> None:
    unknown = {module_of(path) for path in MODULES if package_of(module_of(path)) == "__init__"}
    assert not unknown, f"give {sorted(unknown)} a rung in LADDER"


def test_a_module_imports_only_from_those_above_it() -> None:
    for path in MODULES:
        package = package_of(module_of(path))
        lower = {name for name in imported_packages(path) if RUNG.get(name, -1) > RUNG[package]}
        assert not lower, f"{path.relative_to(ROOT)} imports {sorted(lower)}, below {package}"


def test_packages_do_not_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for path in MODULES:
        package = package_of(module_of(path))
        graph.setdefault(package, set()).update(imported_packages(path) - {package, "__init__"})
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"imports go in a circle: {' -> '.join(error.args[1])}")


def test_the_library_never_imports_trainers() -> None:
    for path in python_files("tfpar"):
        named = [name for name in imports(path) if f"{name}.".startswith(("trainers.", "tfpar.trainers."))]
        assert not named, f"{path.relative_to(ROOT)} imports {named}; trainers import the library, never the reverse"


def public_names() -> tuple[set[str], set[str], set[str]]:
    """The names of `tfpar.__all__`, of the table of lazy imports, and of the imports that a type checker reads."""
    tree = ast.parse((ROOT / "tfpar" / "__init__.py").read_text(encoding="utf-8"))
    assigned = {
        target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    typed = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for line in node.body
        if isinstance(line, ast.ImportFrom)
        for alias in line.names
    }
    assert len(assigned["__all__"]) == len(set(assigned["__all__"]))
    return set(assigned["__all__"]), set(assigned["_MODULES"]), typed


def test_every_public_name_is_imported_lazily_and_for_type_checkers() -> None:
    names, lazy, typed = public_names()
    assert lazy == names
    assert typed == names


def test_a_type_checker_knows_every_public_name(tmp_path: Path) -> None:
    names = sorted(public_names()[0])
    script = tmp_path / "user_script.py"
    script.write_text("import tfpar\n" + "".join(f"reveal_type(tfpar.{name})\n" for name in [*names, "Miror"]))
    # With the settings and the cache of the test of types.
    completed = subprocess.run(
        [sys.executable, "-m", "mypy", str(script)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    *revealed, misspelt = re.findall(r'Revealed type is "(.*)"', completed.stdout)
    assert len(revealed) == len(names), completed.stdout + completed.stderr
    unknown = [name for name, type_ in zip(names, revealed, strict=True) if type_ == "Any"]
    assert not unknown, f"{unknown} are Any to a type checker"
    assert misspelt == "Any"
    assert 'Module has no attribute "Miror"' in completed.stdout


# The hooks before a commit are the tests of style, with the same versions of the same tools


def hooks() -> list[dict[str, Any]]:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    return list(repository["hooks"])


@pytest.mark.parametrize("tool", sorted({command[0] for command in COMMANDS}))
def test_the_version_of_a_tool_is_pinned_to_the_one_that_runs(tool: str) -> None:
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "setup.cfg")
    pins = re.findall(rf"^{tool}\b(.*)$", settings["options.extras_require"]["test"], re.MULTILINE)
    assert pins == [f" == {metadata.version(tool)}"]


def test_the_hooks_run_the_commands_of_the_tests_in_the_environment_of_the_tests() -> None:
    assert [hook["entry"].split() for hook in hooks()] == [[".venv/bin/python", "-m", *command] for command in COMMANDS]
    # Without file names: the tools choose the files, by the settings that the tests use.
    assert {(hook["language"], hook["pass_filenames"]) for hook in hooks()} == {("system", False)}
