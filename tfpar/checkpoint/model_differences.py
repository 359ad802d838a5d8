"""The differences between the state of a model in a checkpoint and that of another model, in words."""

from __future__ import annotations

from collections.abc import Mapping

_MOST = 3
Shape = tuple[int, ...]


def differences(saved: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> str:
    """Return the first differences in names and shapes in words; nothing for equal ones.

    Args:
        saved: The shape of each saved variable by name.
        wanted: The shape of each variable of the model by name.

    Example:
        >>> print(differences({"a": (2,), "b": (3,)}, {"a": (4,), "c": (3,)}))
        'a' has shape (2,) there and (4,) in this model, 'c' is in this model only, 'b' is there only
    """
    names = [name for name in dict.fromkeys([*wanted, *saved]) if saved.get(name) != wanted.get(name)]
    parts = [_difference(name, saved.get(name), wanted.get(name)) for name in names[:_MOST]]
    more = f", and {len(names) - _MOST} more variables differ" if len(names) > _MOST else ""
    return ", ".join(parts) + more


def _difference(name: str, saved: Shape | None, wanted: Shape | None) -> str:
    if saved is None:
        return f"{name!r} is in this model only"
    return (
        f"{name!r} is there only" if wanted is None else f"{name!r} has shape {saved} there and {wanted} in this model"
    )
