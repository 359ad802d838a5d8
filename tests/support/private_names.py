"""Private names of Keras and TensorFlow that tfpar touches: where each is upstream, and what it is needed for."""

from __future__ import annotations

from typing import NamedTuple

KERAS, TENSORFLOW = "Keras 3.15", "TensorFlow 2.21"  # that the rows were written for


class Row(NamedTuple):
    """Names of one owner.

    Args:
        owner: A module or class by its dotted name, or an object: one of `test_compat.EXAMPLES`.
        names: Attributes of the owner, in one string.
        file: Upstream, from the folder of packages on; it must contain the names.
        reason: What tfpar needs them for.
        since: The first version of Keras that has them.
    """

    owner: str
    names: str
    file: str
    reason: str
    since: tuple[int, int] = (3, 15)

    @property
    def versions(self) -> str:
        """The version that the row was written for."""
        return KERAS if self.file.startswith("keras/") else TENSORFLOW

    @property
    def link(self) -> str:
        """The file in the repository upstream."""
        tag = "keras-team/keras/blob/v3.15.1" if self.versions == KERAS else "tensorflow/tensorflow/blob/v2.21.0"
        return f"https://github.com/{tag}/{self.file}"


_BACKEND, _ADAPTERS = "keras/src/backend", "keras/src/trainers/data_adapters"
_LAYER, _TRAINER, _TF_TRAINER = "layers/layer", "trainers/trainer", "backend/tensorflow/trainer"


def _keras(owner: str, names: str, file: str, reason: str) -> Row:
    return Row(owner, names, f"keras/src/{file}.py", reason)


def _tensorflow(owner: str, names: str, file: str, reason: str) -> Row:
    return Row(owner, names, f"tensorflow/python/{file}.py", reason)


ROWS = [
    # Losses and metrics
    _keras(
        "keras.src.backend.tensorflow.nn",
        "_get_logits sparse_categorical_crossentropy categorical_crossentropy",
        "backend/tensorflow/nn",
        "the cross-entropy of sharded logits",
    ),
    _keras("probabilities", "_keras_logits", "activations/activations", "a copy of probabilities keeps their logits"),
    _keras("keras.src.backend.tensorflow.numpy", "argmax", "backend/tensorflow/numpy", "accuracy of sharded logits"),
    _keras("keras.src.backend.tensorflow.math", "in_top_k", "backend/tensorflow/math", "accuracy of sharded logits"),
    _keras("keras.src.backend.tensorflow.core", "shape", "backend/tensorflow/core", "the shape of sharded logits"),
    _keras(
        "keras.src.losses.loss",
        "reduce_weighted_values apply_mask squeeze_or_expand_to_same_rank scale_loss_for_distribution "
        "unscale_loss_for_distribution",
        "losses/loss",
        "losses are divided once, by the weights of the whole batch (keras-team/keras#19246)",
    ),
    _keras(
        "keras.Model",
        "_compute_loss _symbolic_build _aggregate_additional_loss _flatten_metrics_in_order",
        _TRAINER,
        "the losses and logs of Keras' own step",
    ),
    _keras(
        "keras.src.backend.tensorflow.trainer",
        "TensorFlowTrainer potentially_ragged_concat",
        _TF_TRAINER,
        "added losses of Keras' own step; how predict joins batches",
    ),
    _keras(
        "keras.src.backend.tensorflow.trainer.TensorFlowTrainer",
        "make_train_function make_test_function make_predict_function",
        _TF_TRAINER,
        "Keras' own functions hold the memory of weights, which moves",
    ),
    _keras(
        "keras.src.backend.tensorflow.trainer.TensorFlowTrainer",
        "_maybe_symbolic_build",
        _TF_TRAINER,
        "what tfpar does itself before the first step (keras-team/keras#20585)",
    ),
    _keras(
        "a model",
        "_compile_loss _compile_metrics _loss_tracker _initial_epoch _compile_config",
        _TRAINER,
        "which losses and metrics a step counts, and since which compilation",
    ),
    _keras(
        "keras.src.trainers.trainer.Trainer",
        "_resolve_auto_jit_compile",
        _TRAINER,
        'the devices of the strategy decide what jit_compile="auto" means, not those of the machine',
    ),
    _keras(
        "a model",
        "train_function test_function predict_function _distribute_strategy",
        _TF_TRAINER,
        "a model moves to the devices of a strategy, and Keras' own methods follow",
    ),
    _keras(
        "compiled metrics",
        "_user_metrics _user_weighted_metrics",
        "trainers/compile_utils",
        "metrics that are not built yet have variables too",
    ),
    _keras(
        "keras.src.trainers.compile_utils",
        "CompileMetrics CompileLoss",
        "trainers/compile_utils",
        "the losses of compile, apart from loss objects that these or metrics call",
    ),
    _keras("a compiled loss", "_user_loss metrics", "trainers/compile_utils", "the loss objects of a compiled model"),
    _keras("a metric", "_metrics", "metrics/metric", "metrics inside of metrics"),
    _keras(
        "a metric of a function",
        "_fn _fn_kwargs",
        "metrics/reduction_metrics",
        "trials compare what metric functions return for parts of a batch",
    ),
    # Layers and models
    _keras("keras.src.backend.tensorflow.trainer.TensorFlowTrainer", "fit", _TF_TRAINER, "a logged fit calls tfpar's"),
    _keras("keras.src.utils.traceback_utils", "filter_traceback", "utils/traceback_utils", "it decorates `fit`"),
    _keras(
        "a layer",
        "_metrics _seed_generators _flatten_layers _clear_losses _get_regularization_losses _call_has_training_arg "
        "_call_context_args symbolic_call",
        _LAYER,
        "layers at every depth with their losses, metrics and random state",
    ),
    _keras("a layer", "_remat_mode", "ops/operation", "layers of a keras.RematScope are recomputed as others are"),
    _keras("keras.src.backend.common.remat", "remat RematMode", "backend/common/remat", "the same"),
    _keras("keras.src.layers.layer", "CallContext Node", _LAYER, "a model is read as a graph"),
    _keras(
        "keras.src.backend.common.global_state",
        "get_global_attribute set_global_attribute",
        "backend/common/global_state",
        "the layer call around an operation; the global seed generator",
    ),
    _keras("keras.src.models.functional", "Functional", "models/functional", "models that are graphs of Keras' own"),
    _keras("keras.src.models.functional.Functional", "call", "models/functional", "the same"),
    _keras(
        "a model",
        "_inputs_struct _assert_input_compatibility _standardize_inputs",
        "models/functional",
        "the structure of a model's inputs",
    ),
    _keras("a Sequential model", "_functional", "models/sequential", "the graph of a Sequential model"),
    _keras("a layer", "_inbound_nodes", "ops/operation", "whether a graph of Keras calls a layer with training=True"),
    _keras("keras.src.ops.core", "ConvertToTensor", "ops/core", "an operation that may return its input"),
    _keras("a reshaping operation", "newshape", "ops/numpy", "the size of the batch must not be among the sizes"),
    _keras("a broadcasting operation", "shape", "ops/numpy", "the same"),
    _keras("keras.src.backend.common.keras_tensor", "KerasTensor", "backend/common/keras_tensor", "symbolic tensors"),
    _keras(
        "keras.src.backend",
        "get_autocast_scope AutocastScope standardize_dtype get_keras_mask set_keras_mask",
        "backend/__init__",
        "the dtypes and masks of tensors",
    ),
    _keras("keras.src.backend", "compute_output_spec", "backend/tensorflow/core", "a model is built without data"),
    # Variables and optimizers
    _keras("keras.src.backend.common.variables", "Variable", "backend/common/variables", "reads are recorded"),
    _keras("keras.src.backend.common.variables.Variable", "value assign", "backend/common/variables", "the same"),
    _keras("keras.src.backend.tensorflow.core", "Variable", "backend/tensorflow/core", "memory is allocated later"),
    _keras(
        "a variable",
        "_value _initializer _initialize _initialize_with_initializer _deferred_initialize _shape _dtype _trainable",
        "backend/common/variables",
        "memory is allocated later, or again on another device",
    ),
    _keras("a variable", "_direct_assign", "backend/tensorflow/core", "the same"),
    _keras(
        "keras.src.backend.common.stateless_scope",
        "get_stateless_scope in_stateless_scope",
        "backend/common/stateless_scope",
        "a shard of a traced stage has another value of a weight than the others",
    ),
    _keras(
        "keras.src.optimizers.base_optimizer",
        "BaseOptimizer",
        "optimizers/base_optimizer",
        "the code of one device, which knows no replicas",
    ),
    _keras(
        "keras.src.optimizers.base_optimizer.BaseOptimizer",
        "apply_gradients build _apply_weight_decay _backend_increment_gradient_accumulators _backend_update_step "
        "_overwrite_model_variables_with_average_value",
        "optimizers/base_optimizer",
        "the same",
    ),
    _keras("keras.src.backend.tensorflow.optimizer", "TFOptimizer", "backend/tensorflow/optimizer", "the same"),
    _keras("an optimizer", "_distributed_tf_update_step", "backend/tensorflow/optimizer", "Keras' own update, refused"),
    _keras(
        "an optimizer",
        "_trainable_variables _trainable_variables_indices _var_key",
        "optimizers/base_optimizer",
        "slots are found again where weights have moved",
    ),
    _keras(
        "an optimizer",
        "_variables _clip_gradients _clip_by_norm add_variable_from_reference",
        "optimizers/base_optimizer",
        "shards are updated one by one, and clipped by the norm of the whole weight",
    ),
    _keras("", "_exclude_from_weight_decay", "optimizers/base_optimizer", "the same"),
    _keras(
        "keras.src.backend.tensorflow.optimizer.TFOptimizer",
        "_apply_weight_decay _use_weight_decay",
        "backend/tensorflow/optimizer",
        "the optimizer takes the tf.Variable, and a weight that moved is excluded from weight decay by its former keys",
    ),
    _keras(
        "keras.src.backend.common.variables",
        "register_uninitialized_variable",
        "backend/common/variables",
        "weights that the first batch creates have the names that Keras gives them",
    ),
    _tensorflow("", "_handle_name", "ops/resource_variable_ops", "the copy of a replica has the name of the weight"),
    _tensorflow("", "_unique_id", "ops/resource_variable_ops", "the same"),
    _keras(
        "keras.src.optimizers.base_optimizer.BaseOptimizer",
        "add_variable_from_reference",
        "optimizers/base_optimizer",
        "the same",
    ),
    _keras(
        "keras.src.backend.tensorflow.optimizer.TFOptimizer",
        "add_variable_from_reference",
        "backend/tensorflow/optimizer",
        "the same",
    ),
    _keras(
        "keras.src.optimizers.base_optimizer.BaseOptimizer",
        "apply _backend_apply_gradients _clip_gradients finalize_variable_values",
        "optimizers/base_optimizer",
        "a process updates its own weights, and holds their slots",
    ),
    _keras("keras.src.optimizers.base_optimizer", "global_norm", "optimizers/base_optimizer", "the same"),
    _keras("", "_accumulated_gradients _learning_rate", "optimizers/base_optimizer", "the same"),
    _keras(
        "keras.src.optimizers.loss_scale_optimizer.LossScaleOptimizer",
        "check_finite",
        "optimizers/loss_scale_optimizer",
        "the same",
    ),
    _keras(
        "an optimizer",
        "_get_variable_index",
        "optimizers/base_optimizer",
        "one operation updates a weight and its slots",
    ),
    _keras("", "_momentums _velocities _velocity_hats", "optimizers/adam", "the same"),
    _keras("", "_average_gradients", "optimizers/rmsprop", "the same"),
    _keras("", "_accumulated_grads _accumulated_delta_vars", "optimizers/adadelta", "the same"),
    _keras("", "_accumulators _linears", "optimizers/ftrl", "the same"),
    _keras("", "_m _u", "optimizers/adamax", "the same"),
    _tensorflow(
        "tensorflow.python.distribute.values_util",
        "get_current_replica_id_as_int",
        "distribute/values_util",
        "the same",
    ),
    _tensorflow(
        "tensorflow.python.ops.resource_variable_ops",
        "BaseResourceVariable ResourceVariable",
        "ops/resource_variable_ops",
        "the same",
    ),
    _keras("a variable", "_export_to_saved_model_graph", "backend/tensorflow/core", "sharded weights refuse it"),
    _keras("an optimizer", "_iterations", "optimizers/base_optimizer", "steps of accumulated gradients are counted"),
    _keras("several optimizers", "_optimizer_map", "optimizers/multi_optimizer", "the slots of a weight, its update"),
    _keras("an optimizer", "_distribution_strategy", "backend/tensorflow/optimizer", "an optimizer moves"),
    _keras(
        "keras.src.optimizers.loss_scale_optimizer",
        "LossScaleOptimizer",
        "optimizers/loss_scale_optimizer",
        "the code of one device for scaled losses",
    ),
    _keras(
        "an optimizer of scaled losses",
        "_tf_apply _common_apply inner_optimizer",
        "optimizers/loss_scale_optimizer",
        "the same",
    ),
    _tensorflow("tensorflow.python.ops.gen_math_ops", "add_n", "ops/math_ops", "sums in the order of their arguments"),
    _tensorflow("tensorflow.python.framework.ops.Operation", "_set_attr", "framework/ops", "the same"),
    # Datasets of workers
    _tensorflow("tensorflow.python.data.ops.random_op", "_RandomDataset", "data/ops/random_op", "the same"),
    _tensorflow("tensorflow.python.framework.ops.Graph", "_get_function", "framework/ops", "the same"),
    _tensorflow(
        "tensorflow.python.data.ops.dataset_ops.DatasetV2", "_inputs _functions", "data/ops/dataset_ops", "the same"
    ),
    # Random state
    _keras(
        "keras.src.backend.random",
        "normal truncated_normal uniform randint categorical gamma binomial beta dropout shuffle",
        "backend/tensorflow/random",
        "trials draw typical numbers",
    ),
    _tensorflow(
        "tensorflow.python.ops.random_ops",
        "random_normal truncated_normal random_uniform random_shuffle",
        "ops/random_ops",
        "the same, for functions of TensorFlow that draw, such as those of tf.image",
    ),
    _keras(
        "keras.src.random.seed_generator",
        "GLOBAL_SEED_GENERATOR global_seed_generator make_default_seed python_random",
        "random/seed_generator",
        "the generator of no layer",
    ),
    _keras("keras.src.utils.rng_utils", "GLOBAL_RANDOM_SEED", "utils/rng_utils", "keras.utils.set_random_seed"),
    # Data
    _keras(
        "keras.src.trainers.data_adapters",
        "get_data_adapter is_torch_dataloader is_grain_dataset",
        "trainers/data_adapters/__init__",
        "what fit takes",
    ),
    _keras(
        "keras.src.trainers.data_adapters.array_slicing",
        "can_slice_array convert_to_sliceable",
        "trainers/data_adapters/array_slicing",
        "what fit takes as an array",
    ),
    _keras(
        "keras.src.trainers.data_adapters.data_adapter_utils",
        "NUM_BATCHES_FOR_TENSOR_SPEC is_scipy_sparse is_torch_tensor get_keras_tensor_spec convert_to_tf_tensor_spec "
        "scipy_sparse_to_tf_sparse",
        "trainers/data_adapters/data_adapter_utils",
        "the specs of batches of Python code",
    ),
    _keras(
        "keras.src.trainers.data_adapters.data_adapter",
        "DataAdapter",
        "trainers/data_adapters/data_adapter",
        "a user's own adapter",
    ),
    _keras(
        "keras.src.trainers.data_adapters.generator_data_adapter",
        "GeneratorDataAdapter",
        "trainers/data_adapters/generator_data_adapter",
        "batches of a generator",
    ),
    _keras(
        "the adapter of a generator",
        "_first_batches generator",
        "trainers/data_adapters/generator_data_adapter",
        "the same",
    ),
    _keras(
        "keras.src.trainers.data_adapters.torch_data_loader_adapter",
        "TorchDataLoaderAdapter",
        "trainers/data_adapters/torch_data_loader_adapter",
        "batches of a DataLoader",
    ),
    _keras(
        "keras.src.trainers.data_adapters.py_dataset_adapter",
        "PyDatasetAdapter",
        "trainers/data_adapters/py_dataset_adapter",
        "batches of a PyDataset, in Keras' order",
    ),
    _keras(
        "the adapter of a PyDataset",
        "_standardize_batch _get_iterator enqueuer py_dataset",
        "trainers/data_adapters/py_dataset_adapter",
        "the same",
    ),
    _keras("the workers of a PyDataset", "ready_queue", "trainers/data_adapters/py_dataset_adapter", "the same"),
    _keras("", "_dataloader", "trainers/data_adapters/torch_data_loader_adapter", "batches of a DataLoader"),
    Row(
        "the adapter of a PyDataset",
        "_epoch",
        "keras/src/trainers/data_adapters/py_dataset_adapter.py",
        "the order of an epoch",
        since=(3, 16),
    ),
    # Callbacks
    _keras("a callback", "_model params", "callbacks/callback", "what is no state of a callback"),
    _keras("a TensorBoard callback", "_should_trace", "callbacks/tensorboard", "whether single batches are profiled"),
    _keras(
        "keras.callbacks.SwapEMAWeights",
        "_tf_swap_variables _tf_finalize_ema_values",
        "callbacks/swap_ema_weights",
        "moving averages on the device of one replica",
    ),
    _keras("", "_model_variables_moving_average", "optimizers/base_optimizer", "the averages to swap"),
    # tf.distribute
    _tensorflow(
        "tensorflow.python.util.deprecation",
        "_PRINT_DEPRECATION_WARNINGS",
        "util/deprecation",
        "operations are counted without a warning of TensorFlow's own deprecation",
    ),
    _tensorflow(
        "tensorflow.python.distribute.collective_all_reduce_strategy",
        "CollectiveAllReduceExtended",
        "distribute/collective_all_reduce_strategy",
        "a cluster over given devices, with time limits",
    ),
    _tensorflow(
        "tensorflow.python.distribute.collective_all_reduce_strategy.CollectiveAllReduceExtended",
        "_initialize_local_devices _initialize_multi_worker _enable_check_health _replica_ctx_all_reduce "
        "_use_merge_call _get_variable_creator_initial_value _get_replica_id_in_sync_group _get_local_replica_id "
        "_num_replicas_in_sync",
        "distribute/collective_all_reduce_strategy",
        "the same; communication inside of a step only, through tfpar's collectives; workers with unequal devices",
    ),
    _tensorflow(
        "",
        "_std_server_started _id_in_cluster _host_cross_device_ops",
        "distribute/collective_all_reduce_strategy",
        "the same",
    ),
    _tensorflow(
        "tensorflow.python.distribute.mirrored_strategy",
        "MirroredExtended",
        "distribute/mirrored_strategy",
        "values of new variables that are not broadcast",
    ),
    _tensorflow("", "_cross_device_ops _collective_ops", "distribute/mirrored_strategy", "the default all-reduce"),
    _tensorflow("a replica's context", "_replica_id", "distribute/distribute_lib", "the number of a replica"),
    _tensorflow(
        "tensorflow.python.distribute.values",
        "DistributedVariable SyncOnReadVariable",
        "distribute/values",
        "variables of several replicas",
    ),
    _tensorflow("", "_distribute_strategy", "distribute/values", "the strategy of a variable"),
    Row(
        "tensorflow.compiler.xla.tsl.protobuf",
        "coordination_config_pb2",
        "tensorflow/python/eager/context.py",
        "the time limits of a cluster",
    ),
    Row(
        "tensorflow.compiler.xla.tsl.protobuf.coordination_config_pb2",
        "CoordinatedJob",
        "tensorflow/python/eager/context.py",
        "the same",
    ),
    # The runtime, graphs and functions
    Row(
        "tensorflow.python.eager.record",
        "could_possibly_record",
        "tensorflow/python/eager/record.py",
        "whether a tape of a user records a call",
    ),
    _tensorflow(
        "tensorflow.python.framework.kernels",
        "get_registered_kernels_for_op",
        "framework/kernels",
        "the kernels for GPUs, on machines without one",
    ),
    _tensorflow(
        "tensorflow.python.framework.op_def_registry",
        "get",
        "framework/op_def_registry",
        "the arguments of an operation, by which its kernels are told apart",
    ),
    _tensorflow(
        "tensorflow.python.framework.ops.Operation",
        "_add_control_inputs",
        "framework/auto_control_deps",
        "the gradient of a layer's weights before that of its inputs",
    ),
    _tensorflow(
        "tensorflow.python.framework.ops.Operation",
        "_update_input",
        "framework/ops",
        "the backward pass reads recomputed activations",
    ),
    _tensorflow("tensorflow.python.framework.ops.Operation", "_set_device", "framework/ops", "the device of constants"),
    _tensorflow(
        "tensorflow.python.distribute.numpy_dataset",
        "SingleDevice",
        "distribute/numpy_dataset",
        "slots on the device of one replica",
    ),
    _tensorflow(
        "tensorflow.python.framework.config",
        "is_op_determinism_enabled enable_op_determinism disable_op_determinism",
        "framework/config",
        "sufficient factors on GPUs, with equal bits on all of them, and clocks in measurements",
    ),
    _tensorflow(
        "tensorflow.python.eager.context",
        "Context context anonymous_name FunctionCallOptions global_seed",
        "eager/context",
        "options of the calling thread, variables that TensorFlow names, and whether a seed was set",
    ),
    _tensorflow(
        "TensorFlow's context",
        "_context_handle _seed _rng _internal_operation_seed coordination_service configure_coordination_service "
        "report_error_to_cluster function_call_options host_address_space",
        "eager/context",
        "whether TensorFlow has started; its time limits, failures, random state, options and place in a job",
    ),
    _tensorflow(
        "TensorFlow's context",
        "_compute_gpu_options _memory_growth_map",
        "eager/context",
        "pinned host memory, and memory growth where the user has chosen nothing",
    ),
    _tensorflow(
        "a tape",
        "_push_tape _watch_accessed_variables",
        "eager/backprop",
        "tapes of users watch the tensors that stand for weights in stages",
    ),
    _tensorflow(
        "tensorflow.python.pywrap_tfe",
        "TFE_Py_TapeSetIsStopped TFE_Py_TapeSetRestartOnThread TFE_Py_TapeSetStopOnThread",
        "eager/record",
        "tapes of users record where a stage or a loss is traced",
    ),
    _tensorflow(
        "tensorflow.python.pywrap_tfe",
        "TFE_EnableCollectiveOps",
        "eager/context",
        "the server starts without Python's lock",
    ),
    _tensorflow(
        "tensorflow.python.framework.errors_impl",
        "exception_type_from_error_code",
        "framework/errors_impl",
        "the errors of that",
    ),
    _tensorflow(
        "tensorflow.python.framework.ops",
        "RegisterGradient gradient_registry get_default_graph",
        "framework/ops",
        "gradient functions live as long as their graphs",
    ),
    _tensorflow("a gradient's registration", "_op_type __call__", "framework/ops", "the same"),
    _tensorflow("the registry of gradients", "_registry", "framework/registry", "the same"),
    _tensorflow("tensorflow.python.framework.func_graph", "FuncGraph", "framework/func_graph", "the same"),
    _tensorflow("a graph", "outer_graph", "framework/func_graph", "the same"),
    _tensorflow(
        "a graph",
        "_create_op_internal _colocation_stack _device_function_stack _current_control_dependencies "
        "_gradient_override_map",
        "framework/ops",
        "the scalars of an update are computed once",
    ),
    _tensorflow("tensorflow.python.eager.record", "could_possibly_record", "eager/record", "the same"),
    _tensorflow(
        "tensorflow.python.ops.handle_data_util", "get_resource_handle_data", "ops/handle_data_util", "the same"
    ),
    _tensorflow(
        "tensorflow.python.eager.polymorphic_function.concrete_function",
        "_inference_name _forward_name _backward_name _INFERENCE_PREFIX _FORWARD_PREFIX _BACKWARD_PREFIX",
        "eager/polymorphic_function/concrete_function",
        "XLA's persistent cache finds a compilation by the name of its function",
    ),
    _tensorflow("a graph", "experimental_acd_manager", "framework/ops", "the clock and checks run unordered"),
    _tensorflow(
        "tensorflow.python.framework.auto_control_deps.AutomaticControlDependencies",
        "run_independently",
        "framework/auto_control_deps",
        "the same",
    ),
    _tensorflow(
        "tensorflow.python.eager.polymorphic_function.polymorphic_function",
        "Function",
        "eager/polymorphic_function/polymorphic_function",
        "traces that end with their context",
    ),
    _tensorflow(
        "tensorflow.python.eager.polymorphic_function.atomic_function",
        "InterpolateRuntimeError",
        "eager/polymorphic_function/atomic_function",
        "errors of a lost worker, whose explanation may end the process",
    ),
    _tensorflow(
        "a tf.function",
        "_clone _omit_frequent_tracing_warning _jit_compile _python_function",
        "eager/polymorphic_function/polymorphic_function",
        "the same",
    ),
    _tensorflow(
        "tensorflow.python.eager.polymorphic_function.attributes",
        "POLYMORPHIC_FUNCTION_ALLOWLIST TRACING_COMPILATION_ALLOWLIST MONOMORPHIC_FUNCTION_ALLOWLIST "
        "DISABLE_CALL_SHAPE_INFERENCE",
        "eager/polymorphic_function/attributes",
        "functions that are not inlined, and calls without inference of shapes",
    ),
    Row(
        "tensorflow.core.framework.attr_value_pb2",
        "AttrValue NameAttrList",
        "tensorflow/core/framework/attr_value_pb2.py",
        "calls without inference of shapes",
    ),
]
# Strings that are no attributes: of the graph optimizer (function_optimizer.cc), and of the layer call around an
# operation (keras/src/layers/layer.py).
NO_ATTRIBUTES = {
    "_class",
    "_noinline",
    "_nospecialize",
    "_grappler_ArithmeticOptimizer_AddOpsRewriteStage",
}
