"""Suggestions for mistyped and abbreviated names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MAX_CHARACTERS = 200


def closest(word: str, names: Iterable[str]) -> str | None:
    """Return the name that is closest to a word; None if no name is close.

    Equality except for case and separators counts first, then initials, substrings and typing errors.

    Args:
        word: The received word.
        names: The possible names, likelier ones first.

    Example:
        >>> closest("lr", ["name", "learning_rate"])
        'learning_rate'
        >>> closest("resnet50", ["ResNet50", "ResNet50V2"])
        'ResNet50'
        >>> closest("batch_size", ["epochs", "global_batch_size"])
        'global_batch_size'
    """
    if len(word) > _MAX_CHARACTERS:  # the comparison would take seconds
        return None
    by_plain = {_plain(name): name for name in reversed(list(names))}
    plain = _plain(word)
    if plain in by_plain:
        return by_plain[plain]
    likely = list(reversed(by_plain.values()))
    for name in likely:
        parts = name.lower().split("_")
        if len(parts) > 1 and plain == "".join(part[0] for part in parts if part):
            return name
    near = [key for key in reversed(by_plain) if len(plain) > 3 and plain in key]
    near = near or difflib.get_close_matches(plain, reversed(by_plain), n=1)
    return by_plain[near[0]] if near else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return a question that follows a sentence, with a leading space; empty if no name is close.

    Example:
        >>> did_you_mean("mirored", ["auto", "mirrored"])
        ' Did you mean mirrored?'
    """
    name = closest(word, names)
    return f" Did you mean {name}?" if name else ""


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(".", "")
