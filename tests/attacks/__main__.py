"""Run one attack for long: `python -m tests.attacks parsers --inputs 10000`; without a name, list the attacks."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Sequence
from types import ModuleType

from tests import attacks


def names() -> list[str]:
    """Return the modules of this package that are attacks: each has `main(arguments)`, which returns an exit code."""
    found = [module.name for module in pkgutil.iter_modules(attacks.__path__) if not module.name.startswith("__")]
    return [name for name in found if not name.startswith("test_") and hasattr(_module(name), "main")]


def main(arguments: Sequence[str]) -> int:
    """Run an attack.

    Args:
        arguments: Its name and its own flags.

    Returns:
        Its exit code: 0 if nothing was found.
    """
    if not arguments or arguments[0] not in names():
        summaries = "\n".join(f"  {name:12}{(_module(name).__doc__ or '').splitlines()[0]}" for name in names())
        print(f"usage: python -m tests.attacks NAME [FLAG ...]\n\n{summaries}", file=sys.stderr)
        return 1
    return int(_module(arguments[0]).main(arguments[1:]))


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"tests.attacks.{name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
