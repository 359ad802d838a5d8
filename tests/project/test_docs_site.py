"""The documentation as MkDocs builds it: without a warning, and with every public name, setting and flag."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tfpar
from tests import ROOT
from tfpar import config, launch, train


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages; a dead link, a page out of the navigation or an unknown name fails the build."""
    site = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    assert built.stderr == ""
    return site


def text_of(page: Path) -> str:
    """The words of a page, without its tags."""
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text()))


def test_the_reference_has_every_public_name(site: Path) -> None:
    reference = "".join(page.read_text() for page in site.glob("api/*/index.html"))
    assert not [name for name in tfpar.__all__ if f'id="tfpar.{name}"' not in reference]


def test_examples_of_docstrings_are_code(site: Path) -> None:
    reference = "".join(page.read_text() for page in site.glob("api/*/index.html"))
    assert "&gt;&gt;&gt;" in reference
    assert "<blockquote>" not in reference  # what Markdown makes of >>> outside of code


def test_every_example_is_shown(site: Path) -> None:
    shown = text_of(site / "examples" / "index.html")
    scripts = list((ROOT / "examples").glob("*.py"))
    assert scripts
    assert not [script for script in scripts if script.name not in shown]


def test_every_setting_and_flag_is_listed(site: Path) -> None:
    listed = text_of(site / "settings" / "index.html").split()
    run = tomllib.loads(config.dump(config.Run()))
    keys = [key for section in run.values() if isinstance(section, dict) for key in section]
    flags = [f"--{flag}" for command in (train.COMMAND, launch.COMMAND) for flag in command.flags]
    assert not [name for name in [*run, *keys, *flags] if name not in listed and f"[{name}]" not in listed]
