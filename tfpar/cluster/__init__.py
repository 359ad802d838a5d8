"""Worker addresses, local devices and cores of a job. Importing it does not import TensorFlow."""

from tfpar.cluster.gpu.gpu_cards import card_numbers, take_share_of_slurm_task
from tfpar.cluster.gpu.gpu_memory import free_bytes
from tfpar.cluster.process_devices import (
    check_one_kind,
    configured_devices,
    more_devices,
    native_messages_to,
    resolve_devices,
    short_name,
    use_logical_cpus,
)

__all__ = [
    "card_numbers",
    "check_one_kind",
    "configured_devices",
    "free_bytes",
    "more_devices",
    "native_messages_to",
    "resolve_devices",
    "short_name",
    "take_share_of_slurm_task",
    "use_logical_cpus",
]
