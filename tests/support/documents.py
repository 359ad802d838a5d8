"""The README and the pages of docs/: their blocks by language, their commands, and the programs among them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests import ROOT

INSTALL = "sh install.sh"
DEFAULT = ".venv/bin/python -m tfpar.train"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Commands that no test runs, by one of their words, with the reason.
NOT_RUN = {
    INSTALL: "installs; CI begins with it",
    "srun": "needs an allocation of Slurm; tests/cluster/test_slurm_multi_process.py runs it where Slurm is installed",
    "TF_CONFIG=": "needs two machines; tests/launcher/test_jobs_multi_process.py starts such processes on one",
    "--hosts": "needs two hosts; tests/cluster/test_several_hosts_multi_process.py runs it in network namespaces",
    "tfpar.report": "needs runs; tests/reports/test_report_of_training.py runs it",
    "-m pytest": "is what runs these tests",
}
LANGUAGES = {"diff", "python", "sh", "toml", "text"}  # the last is for drawings, formulas and output


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


def sections(document: Path) -> dict[str, list[str]]:
    """The Python blocks of each section of a page that has any, without the programs that commands start."""
    programs, found = files().values(), {}
    for text in re.split(r"^## ", document.read_text(), flags=re.MULTILINE)[1:]:
        of_section = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        found[text.partition("\n")[0]] = [block for block in of_section if block not in programs]
    return {heading: blocks for heading, blocks in found.items() if blocks}


def require_imports(*programs: str) -> None:
    """Skip the test if a package that a program imports is not installed."""
    for node in ast.walk(ast.parse("\n".join(programs))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in [node.module] if isinstance(node, ast.ImportFrom) else names:
            pytest.importorskip(str(name))


def commands(*documents: Path) -> list[str]:
    found = [block.replace("\\\n", "") for document in documents for block in blocks(document, "sh")]
    lines = [line.split("  #")[0].strip() for block in found for line in block.splitlines()]
    return list(dict.fromkeys(line for line in lines if line))


def run_commands() -> list[str]:
    """The commands that are run, each once, without the installation in front of them."""
    parts = [part.strip() for command in commands(*DOCUMENTS) for part in command.split("&&")]
    return list(dict.fromkeys(part for part in parts if not any(word in part for word in NOT_RUN)))


def files() -> dict[str, str]:
    """The blocks that begin with the name of the file that they are."""
    found = {}
    for document in DOCUMENTS:
        for block in blocks(document, "python"):
            name = re.search(r"# (\w+\.py)", block.splitlines()[0])
            if name:
                assert found.setdefault(name[1], block) == block, f"{name[1]} differs between documents"
    return found
