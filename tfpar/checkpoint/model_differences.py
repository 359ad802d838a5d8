"""Error messages about a checkpoint that does not fit the model."""

from __future__ import annotations

from collections.abc import Mapping

_MAX_SHOWN = 3
_OPTIMIZER = "optimizer/"
Shape = tuple[int, ...]


def refusal(saved: Mapping[str, Shape], expected: Mapping[str, Shape]) -> str:
    """Return why a saved state does not fit a model, as the rest of a sentence that begins with its origin.

    Args:
        saved: The shape of each saved variable by name.
        expected: The shape of each variable of the model by name; it differs from `saved`.

    Example:
        >>> weights = {"weights/kernel": (2,)}
        >>> print(refusal(weights | {"optimizer/adam/iteration": ()}, weights | {"optimizer/sgd/iteration": ()}))
        has the weights of this model, but the state of the optimizer adam, and this model has sgd. Resume with the
        optimizer that it was written with, or use another directory.
    """
    first = differences(saved, expected)
    if not _have_equal_weights(saved, expected):
        return f"is of another model: {first}. Resume with the model that wrote it, or use another directory."
    there, here = _optimizers(saved), _optimizers(expected)
    if there == here or not (there and here):
        state = f"the state of its optimizer with other settings: {first}"
    else:
        state = f"the state of the optimizer {there}, and this model has {here}"
    way_out = "Resume with the optimizer that it was written with, or use another directory."
    return f"has the weights of this model, but {state}. {way_out}"


def _have_equal_weights(saved: Mapping[str, Shape], expected: Mapping[str, Shape]) -> bool:
    """Return whether all variables except those of optimizers are equal, and some of them are weights."""
    there, here = (
        {name: shape for name, shape in shapes.items() if not name.startswith(_OPTIMIZER)}
        for shapes in (saved, expected)
    )
    return there == here and any(name.startswith("weights/") for name in here)


def _optimizers(shapes: Mapping[str, Shape]) -> str:
    """Return the names of optimizers, which begin the paths of their variables."""
    paths = [name.removeprefix(_OPTIMIZER) for name in shapes if name.startswith(_OPTIMIZER)]
    return ", ".join(dict.fromkeys(path.partition("/")[0] for path in paths if "/" in path))


def differences(saved: Mapping[str, Shape], expected: Mapping[str, Shape]) -> str:
    """Describe the first differences in names and shapes; empty if there are none.

    Args:
        saved: The shape of each saved variable by name.
        expected: The shape of each variable of the model by name.

    Example:
        >>> print(differences({"a": (2,), "b": (3,)}, {"a": (4,), "c": (3,)}))
        'a' has shape (2,) there and (4,) in this model, 'c' is in this model only, 'b' is there only
    """
    names = [name for name in dict.fromkeys([*expected, *saved]) if saved.get(name) != expected.get(name)]
    parts = [_difference(name, saved.get(name), expected.get(name)) for name in names[:_MAX_SHOWN]]
    more = f", and {len(names) - _MAX_SHOWN} more variables differ" if len(names) > _MAX_SHOWN else ""
    return ", ".join(parts) + more


def _difference(name: str, saved: Shape | None, expected: Shape | None) -> str:
    if saved is None:
        return f"{name!r} is in this model only"
    return (
        f"{name!r} is there only"
        if expected is None
        else f"{name!r} has shape {saved} there and {expected} in this model"
    )
