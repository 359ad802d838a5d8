"""TOML that may be hostile: parsed within fixed bounds of depth, size and time."""

import itertools
import re
import tomllib
from typing import Any

from tfpar.messages import received

MAX_BYTES = 1 << 20  # of a configuration
MAX_LEVELS = 32  # of tables and lists within each other
_INT64 = range(-(1 << 63), 1 << 63)  # the integers of TOML
# Texts and comments, in which a dot does not part keys.
_TEXTS = re.compile(
    r'''"""(?:\\.|[^\\])*?(?:"""|\Z)|\'{3}.*?(?:\'{3}|\Z)|"(?:\\.|[^"\\\n])*+"?|'[^'\n]*+'?|#[^\n]*+''',
    re.DOTALL,
)
# Python 3.11 takes a time that grows with the square of the parts of a dotted key, so they are counted first.
_DEEP_KEY = re.compile(rf"(?<![\w-])(?:[\w-]++[ \t]*+\.[ \t]*+){{{MAX_LEVELS}}}", re.ASCII)


def parse(text: str) -> dict[str, Any]:
    """Read TOML that may be hostile.

    Args:
        text: TOML.

    Returns:
        Its tables: at most `MAX_LEVELS` deep, integers of 64 bits, texts that can be written as UTF-8.

    Raises:
        tomllib.TOMLDecodeError: it is not valid TOML.
        ValueError: it is beyond these limits; the end of a sentence.

    >>> parse("x = " + "[" * 9999)
    Traceback (most recent call last):
    ValueError: must have tables and lists at most 32 levels deep, and it has deeper ones: flatten them.
    """
    deep = f"must have tables and lists at most {MAX_LEVELS} levels deep, and it has deeper ones: flatten them."
    if _DEEP_KEY.search(_TEXTS.sub("text", text)):
        raise ValueError(deep)
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise ValueError(deep) from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python's limit on the digits of an integer
        raise ValueError("must have integers of 64 bits, and it has one of thousands of digits: shorten it.") from None
    _check_limits(tables, deep)
    return tables


def _check_limits(tables: dict[str, Any], deep: str) -> None:
    level: list[Any] = [tables]
    for _ in range(MAX_LEVELS + 1):
        if not level:
            return
        for value in level:
            if isinstance(value, str) and "\0" in value:
                raise ValueError(
                    f"must have texts without null characters, and it has {received.toml(value)}: correct it."
                )
            if isinstance(value, int) and value not in _INT64:
                raise ValueError(
                    f"must have integers of 64 bits, and it has {received.toml(value)}: take a smaller one."
                )
        inner = [list(one.values()) if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = list(itertools.chain.from_iterable(inner))
    raise ValueError(deep)
