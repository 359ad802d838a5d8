"""Every example in a docstring of the data package runs."""

import doctest
import importlib
import pkgutil

import pytest

import tfpar.data

MODULES = sorted(module.name for module in pkgutil.iter_modules(tfpar.data.__path__))


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    results = doctest.testmod(importlib.import_module(f"tfpar.data.{name}"))
    assert results.failed == 0
