"""The hooks before a commit are the tests of style, with the same versions of the same tools."""

import configparser
import re
from importlib import metadata
from typing import Any

import pytest
import yaml

from tests import ROOT
from tests.project.test_style import COMMANDS


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
