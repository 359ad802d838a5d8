"""The differences between the state of a model in a checkpoint and that of another model, in words."""

from __future__ import annotations

from collections.abc import Mapping

_MOST = 3
_OF_OPTIMIZERS = "optimizer/"
Shape = tuple[int, ...]


def refusal(saved: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> str:
    """Return why a saved state cannot be resumed and the way out, in words that follow its origin.

    Args:
        saved: The shape of each saved variable by name.
        wanted: The shape of each variable of the model by name, which differ.

    Example:
        >>> weights = {"weights/kernel": (2,)}
        >>> print(refusal(weights | {"optimizer/adam/iteration": ()}, weights | {"optimizer/sgd/iteration": ()}))
        has the weights of this model, but the state of the optimizer adam, and this model has sgd. Resume with the
        optimizer that it was written with, or use another directory.
    """
    first = differences(saved, wanted)
    if not _have_equal_weights(saved, wanted):
        return f"is of another model: {first}. Resume with the model that wrote it, or use another directory."
    there, here = _optimizers(saved), _optimizers(wanted)
    if there == here or not (there and here):
        state = f"the state of its optimizer with other settings: {first}"
    else:
        state = f"the state of the optimizer {there}, and this model has {here}"
    way_out = "Resume with the optimizer that it was written with, or use another directory."
    return f"has the weights of this model, but {state}. {way_out}"


def _have_equal_weights(saved: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> bool:
    """Return whether there are weights, and they and all others but the variables of optimizers are equal."""
    there, here = (
        {name: shape for name, shape in shapes.items() if not name.startswith(_OF_OPTIMIZERS)}
        for shapes in (saved, wanted)
    )
    return there == here and any(name.startswith("weights/") for name in here)


def _optimizers(shapes: Mapping[str, Shape]) -> str:
    """Return the names of optimizers, with which the paths of their variables begin."""
    paths = [name.removeprefix(_OF_OPTIMIZERS) for name in shapes if name.startswith(_OF_OPTIMIZERS)]
    return ", ".join(dict.fromkeys(path.partition("/")[0] for path in paths if "/" in path))


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
