"""The house rules that a machine can check: style, types, the ladder of imports, the length of files."""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_LINES = 350
# A module imports from its own rung or from those above it. A package (data, strategies) counts as one module.
LADDER = [
    [
        "cores",
        "excerpts",
        "figures",
        "job_secret",
        "loopback",
        "notices",
        "per_model",
        "quiet",
        "standard_streams",
    ],
    [
        "atomic_file",
        "_compat_callbacks",
        "_compat_data",
        "_compat_draws",
        "_compat_gradients",
        "_compat_imports",
        "_compat_losses",
        "_compat_metrics",
        "_compat_objectives",
        "_compat_tracing",
        "_compat_versions",
        "slices",
        "command_start",
        "suggestions",
        "toml_limits",
        "update_order",
    ],
    [
        "_toml",
        "arguments",
        "background",
        "checkpoint_file",
        "command_line",
        "config_files",
        "config_sections",
        "number_flags",
        "slurm",
    ],
    ["json_lines"],
    ["config_data", "run_files"],
    [
        "config",
        "_compat",
        "_compat_build",
        "_compat_graph",
        "_compat_pipeline",
        "_compat_random",
        "_compat_server",
        "_compat_variables",
        "batch_systems",
        "tf_config",
    ],
    ["config_use", "callback_state", "cluster", "collectives", "data", "launcher", "meeting"],
    ["checkpoint_state", "reduction", "run_directory"],
    ["run_summary"],
    ["loop", "metric_entries", "whole_batch"],
    ["losses_of_parts"],
    ["loss_kinds"],
    ["loss_values"],
    ["division"],
    ["objective"],
    ["checks", "model_state"],
    ["pipeline"],
    ["preview"],
    ["strategies", "checkpoint", "stream"],
    ["alike", "built", "callback_list", "callbacks", "compiled", "model_function", "resume"],
    ["epoch_table", "folder_watch", "step_summaries"],
    ["calls", "evaluation", "training", "preparation", "trainer", "drop_in", "interruption", "parity"],
    ["pipeline_view", "trainer_class"],
    ["run_header"],
    ["session"],
    ["evaluator"],
    ["train", "launch", "__main__"],
]
RUNG = {module: rung for rung, modules in enumerate(LADDER) for module in modules}


def python_files(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def module_of(path: Path) -> str:
    """The first name below tfpar: `tfpar/data/digits.py` belongs to `data`, `tfpar/__init__.py` to `__init__`."""
    return path.relative_to(ROOT / "tfpar").parts[0].removesuffix(".py")


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


def imported_modules(path: Path) -> set[str]:
    """Modules of tfpar that a file imports; a name of `tfpar` itself counts as `__init__`."""
    below = {name.split(".")[1] for name in imports(path) if name.startswith("tfpar.")}
    known = {module_of(other) for other in python_files("tfpar")} | RUNG.keys()
    return {name if name in known else "__init__" for name in below}


@pytest.mark.parametrize("command", [["ruff", "check"], ["mypy"]], ids=lambda command: command[0])
def test_no_tool_complains(command: list[str]) -> None:
    completed = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, f"{' '.join(command)}:\n{completed.stdout}{completed.stderr}"


def test_every_module_has_a_rung_on_the_ladder() -> None:
    modules = {module_of(path) for path in python_files("tfpar")} - {"__init__"}
    assert modules <= RUNG.keys(), f"give {sorted(modules - RUNG.keys())} a rung in LADDER"


@pytest.mark.parametrize("path", python_files("tfpar"), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_from_those_above_it(path: Path) -> None:
    module = module_of(path)
    if module == "__init__":
        return
    lower = {name for name in imported_modules(path) if RUNG.get(name, len(LADDER)) > RUNG[module]}
    assert not lower, f"{path.relative_to(ROOT)} imports {sorted(lower)}, below {module}"


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for path in python_files("tfpar"):
        module = module_of(path)
        if module != "__init__":
            graph.setdefault(module, set()).update(imported_modules(path) - {module})
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"imports go in a circle: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("path", python_files("tfpar"), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_library_never_imports_trainers(path: Path) -> None:
    named = [name for name in imports(path) if f"{name}.".startswith(("trainers.", "tfpar.trainers."))]
    assert not named, f"{path.relative_to(ROOT)} imports {named}; trainers import the library, never the reverse"


@pytest.mark.parametrize("path", python_files("tfpar", "trainers"), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_is_longer_than_the_hard_look(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{path.relative_to(ROOT)} has {lines} lines, at most {MAX_LINES}: split it by idea"


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
    return set(assigned["__all__"]), set(assigned["_HOMES"]), typed


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
