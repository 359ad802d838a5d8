"""Lines of the user's own code are told from those of libraries, and functions have their full names."""

from __future__ import annotations

import traceback
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import tfpar
from tfpar.checks import users_module
from tfpar.messages import users_code


class Outer:
    def method(self) -> None:
        def inner() -> None:
            raise KeyError("the line that is found")

        inner()


def test_the_last_line_of_the_users_own_code_is_found() -> None:
    with pytest.raises(KeyError) as raised:
        Outer().method()
    place = users_code.last_place(traceback.extract_tb(raised.tb))
    assert place is not None
    assert place.file == __file__
    assert "the line that is found" in Path(__file__).read_text().splitlines()[place.line - 1]
    assert place.function == "Outer.method.inner"


@pytest.mark.parametrize("file", [tfpar.__file__, np.__file__, traceback.__file__, mock.__file__, "<stdin>"])
def test_a_line_of_a_library_is_not_the_users(file: str) -> None:
    assert users_code.last_place([traceback.FrameSummary(file, 1, "function")]) is None


@pytest.mark.parametrize("text", [None, "def broken(:\n", "VALUE = 1\n"])
def test_a_line_without_a_known_function_has_no_name(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    if text is not None:
        file.write_text(text)
    assert users_code.last_place([traceback.FrameSummary(str(file), 1, "f")]) == (str(file), 1, "")


def test_the_line_of_a_syntax_error_is_found_in_no_frame(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import keras\ndef build_model(:\n")
    with pytest.raises(SyntaxError) as caught:
        users_module.imported(str(file))
    assert users_code.users_place(caught.value) == f"{file}:2"
