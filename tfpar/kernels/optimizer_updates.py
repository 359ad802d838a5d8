"""Update weights with one operation of TensorFlow each, if it computes the formula of Keras' optimizer.

Keras' Adam takes about ten operations per weight, `ResourceApplyAdam` one. Nadam, Lion, Adafactor and others have no
kernel with Keras' formula.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfpar import host_sizes
from tfpar._compat.optimizers import keras_optimizer
from tfpar._compat.variables import tf_variables
from tfpar.kernels import row_updates

# The optimizer classes that define an `update_step` to replace.
REPLACED = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.RMSprop,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Ftrl,
    keras.optimizers.Adamax,
)
_TYPES = (tf.float32, tf.float64)  # in half precision the kernels lose the digits of 1 - 0.999, and CPUs are slower
# The kernels compute 1 - decay in the dtype of the weight: 0.001 has a relative error of 1.3e-5 in float32.
_EXACT = 1e-6


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An operation that updates a weight.

    Attributes:
        run: The operation; takes handles, numbers and `grad` as keyword arguments.
        slots: The optimizer slot for each argument.
        numbers: The hyperparameter for each argument.
        decays: Hyperparameters that the operation subtracts from 1.
        powers: Hyperparameters that are raised to the power of the step, which Keras casts through float32.
        adjust: Changes the tensors, by argument, before the operation; takes the step too.
        by_rows: Converts `run` and a sparse gradient, see `row_updates`; None if Keras' own update must run.
    """

    run: Callable[..., Any]
    slots: Mapping[str, str]
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    decays: tuple[Any, ...] = ()
    powers: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    adjust: Callable[[dict[str, Any], tf.Tensor], None] = lambda tensors, step: None
    by_rows: row_updates.ByRows | None = None


def update(optimizer: Any, gradient: Any, variable: Any, learning_rate: Any) -> bool:
    """Update a weight with one operation; return False if none computes what Keras does.

    Args:
        optimizer: A built Keras optimizer.
        gradient: The dense or sparse gradient.
        variable: The memory of the weight.
        learning_rate: The learning rate of this update.
    """
    find = _KERNELS.get(type(optimizer))
    if find is None or variable.dtype not in _TYPES or not _has_shape(gradient, variable.shape):
        return False
    kernel = find(optimizer, variable.dtype)
    if kernel is None or not _suits(kernel, variable.dtype):
        return False
    handles = keras_optimizer.resource_handles(optimizer, variable, list(kernel.slots.values()))
    if handles is None:
        return False
    run, gradient = kernel.run, tf.cast(gradient, variable.dtype)
    if isinstance(gradient, tf.IndexedSlices):
        if kernel.by_rows is None or host_sizes.is_gpu(variable.device):
            return False
        run, gradient = kernel.by_rows(run, gradient, variable.shape)
    memory = dict(zip(("var", *kernel.slots), handles, strict=True))
    run(**memory, **_tensors(kernel, optimizer, gradient, learning_rate))
    return True


def _has_shape(gradient: Any, shape: tf.TensorShape) -> bool:
    """Return whether a gradient has the shape of its weight; Keras would broadcast another."""
    if isinstance(gradient, tf.IndexedSlices):
        return bool(gradient.values.shape[1:].is_compatible_with(shape[1:]))
    return isinstance(gradient, tf.Tensor) and bool(gradient.shape.is_compatible_with(shape))


def _suits(kernel: Kernel, dtype: tf.DType) -> bool:
    """Return whether all hyperparameters are numbers, and `1 - decay` keeps its digits."""
    values = (*kernel.numbers.values(), *kernel.powers.values(), *kernel.decays)
    if not all(_is_number(value) for value in values):
        return False
    return all(abs(_complement_error(decay, dtype)) <= _EXACT for decay in kernel.decays)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _complement_error(decay: float, dtype: tf.DType) -> float:
    """Return the relative error of `1 - decay` in a dtype."""
    number = dtype.as_numpy_dtype
    return 0.0 if decay == 1 else float(number(1) - number(decay)) / (1 - decay) - 1


def _tensors(kernel: Kernel, optimizer: Any, gradient: tf.Tensor, rate: Any) -> dict[str, Any]:
    """Return the inputs of an operation except memory, with the values that Keras computes."""
    dtype = gradient.dtype
    step = keras.ops.cast(optimizer.iterations + 1, dtype) if kernel.powers else None
    tensors = {name: tf.constant(value, dtype) for name, value in kernel.numbers.items()}
    tensors |= {name: tf.pow(keras.ops.cast(value, dtype), step) for name, value in kernel.powers.items()}
    tensors |= {"lr": keras.ops.cast(rate, dtype), "grad": gradient}
    kernel.adjust(tensors, step)
    return tensors


def _sgd(optimizer: Any, dtype: tf.DType) -> Kernel | None:
    if not _is_number(optimizer.momentum):
        return None
    if optimizer.momentum == 0:
        return Kernel(lambda var, lr, grad: tf.raw_ops.ResourceApplyGradientDescent(var=var, alpha=lr, delta=grad), {})

    def run(**inputs: Any) -> Any:
        momentum = keras.ops.cast(optimizer.momentum, dtype)  # through float32, as in Keras
        return tf.raw_ops.ResourceApplyKerasMomentum(momentum=momentum, use_nesterov=bool(optimizer.nesterov), **inputs)

    return Kernel(run, {"accum": "momentums"}, by_rows=row_updates.summed)


def _adam(optimizer: Any, dtype: tf.DType) -> Kernel | None:
    if not (_is_number(optimizer.beta_1) and _is_number(optimizer.beta_2)):
        return None
    run, slots = tf.raw_ops.ResourceApplyAdam, {"m": "momentums", "v": "velocities"}
    if optimizer.amsgrad:
        run, slots = tf.raw_ops.ResourceApplyAdamWithAmsgrad, slots | {"vhat": "velocity_hats"}
    numbers = {"beta1": optimizer.beta_1, "beta2": optimizer.beta_2, "epsilon": optimizer.epsilon}
    powers = {"beta1_power": optimizer.beta_1, "beta2_power": optimizer.beta_2}
    by_rows = functools.partial(row_updates.adam, beta_1=optimizer.beta_1) if optimizer.beta_1 else None
    kernel = Kernel(run, slots, numbers, (optimizer.beta_1, optimizer.beta_2), powers, by_rows=by_rows)
    error = _complement_error(optimizer.beta_2, dtype)
    if _EXACT < abs(error) <= 2e-5:
        return dataclasses.replace(kernel, decays=(optimizer.beta_1,), adjust=_exact_squares(optimizer.beta_2, error))
    return kernel


def _exact_squares(beta_2: float, error: float) -> Callable[[dict[str, Any], tf.Tensor], None]:
    r"""Return an adjustment of Adam's inputs for `1 - beta_2`, which is `c` in Keras and rounded to `c'` in the kernel.

    The gradient times $\sqrt{c / c'}$ adds Keras' squares to the velocities; the momentum gets this factor too, for
    0.999 a relative error of 6e-6. The velocities shrink by `c'` per step, so that for a constant gradient their root
    after `t` steps is too large by $\sqrt{(1 - (1 - c')^t) / (1 - (1 - c)^t)}$, which the learning rate corrects.
    """
    own = 1 - beta_2
    rounded = own * (1 + error)

    def adjust(tensors: dict[str, Any], step: tf.Tensor) -> None:
        share, share_in_keras = (tf.math.expm1(step * math.log1p(-shrinking)) for shrinking in (rounded, own))
        tensors["grad"] *= np.sqrt(own / rounded).astype(tensors["grad"].dtype.as_numpy_dtype)
        tensors["lr"] *= tf.sqrt(share / share_in_keras)

    return adjust


def _rmsprop(optimizer: Any, dtype: tf.DType) -> Kernel | None:
    if not _is_number(optimizer.momentum):
        return None
    run, slots = tf.raw_ops.ResourceApplyRMSProp, {"ms": "velocities"}
    if optimizer.centered:
        run, slots = tf.raw_ops.ResourceApplyCenteredRMSProp, slots | {"mg": "average_gradients"}
    numbers = {"rho": optimizer.rho, "momentum": optimizer.momentum, "epsilon": optimizer.epsilon}
    if optimizer.momentum > 0:
        return Kernel(run, slots | {"mom": "momentums"}, numbers, (optimizer.rho,))
    by_rows = None if optimizer.centered else functools.partial(row_updates.rmsprop, rho=optimizer.rho)
    run = functools.partial(_with_temporary_momentum, run)
    return Kernel(run, slots, numbers, (optimizer.rho,), by_rows=by_rows)


def _with_temporary_momentum(run: Callable[..., Any], **inputs: Any) -> None:
    """Run an operation with a temporary momentum slot, which Keras does not have for a momentum of 0."""
    gradient = inputs["grad"]
    slot = tf_variables.anonymous_handle(gradient.dtype, gradient.shape)
    tf.raw_ops.AssignVariableOp(resource=slot, value=tf.zeros_like(gradient))
    run(mom=slot, **inputs)


def _adagrad(optimizer: Any, dtype: tf.DType) -> Kernel | None:
    """Return the kernel if Keras' epsilon inside the root is negligible, as at its defaults: 5e-7."""
    epsilon, least = optimizer.epsilon, optimizer.initial_accumulator_value
    if dtype != tf.float32 or not (_is_number(epsilon) and _is_number(least)) or not 0 <= epsilon <= 2 * least * _EXACT:
        return None
    by_rows = functools.partial(row_updates.adagrad, epsilon=epsilon)
    return Kernel(tf.raw_ops.ResourceApplyAdagrad, {"accum": "accumulators"}, by_rows=by_rows)


def _adadelta(optimizer: Any, dtype: tf.DType) -> Kernel:
    slots = {"accum": "accumulated_grads", "accum_update": "accumulated_delta_vars"}
    numbers = {"rho": optimizer.rho, "epsilon": optimizer.epsilon}
    return Kernel(tf.raw_ops.ResourceApplyAdadelta, slots, numbers, (optimizer.rho,))


def _ftrl(optimizer: Any, dtype: tf.DType) -> Kernel | None:
    if optimizer.learning_rate_power != -0.5:  # the kernel is slower than Keras there
        return None
    numbers = {
        "l1": optimizer.l1_regularization_strength,
        "l2": optimizer.l2_regularization_strength,
        "l2_shrinkage": optimizer.l2_shrinkage_regularization_strength,
        "lr_power": optimizer.learning_rate_power,
    }

    def adjust(tensors: dict[str, Any], step: Any) -> None:
        tensors["l2"] += optimizer.beta / (2.0 * tensors["lr"])

    slots = {"accum": "accumulators", "linear": "linears"}
    return Kernel(tf.raw_ops.ResourceApplyFtrlV2, slots, numbers, adjust=adjust)


def _adamax(optimizer: Any, dtype: tf.DType) -> Kernel:
    numbers = {"beta1": optimizer.beta_1, "beta2": optimizer.beta_2, "epsilon": optimizer.epsilon}
    powers = {"beta1_power": optimizer.beta_1}
    return Kernel(tf.raw_ops.ResourceApplyAdaMax, {"m": "m", "v": "u"}, numbers, (optimizer.beta_1,), powers)


# Exact classes: a subclass may override what Keras' own update calls.
_KERNELS: dict[type, Callable[[Any, tf.DType], Kernel | None]] = {
    keras.optimizers.SGD: _sgd,
    keras.optimizers.Adam: _adam,
    keras.optimizers.AdamW: _adam,
    keras.optimizers.RMSprop: _rmsprop,
    keras.optimizers.Adagrad: _adagrad,
    keras.optimizers.Adadelta: _adadelta,
    keras.optimizers.Ftrl: _ftrl,
    keras.optimizers.Adamax: _adamax,
}
