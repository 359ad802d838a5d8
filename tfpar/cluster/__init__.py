"""The workers of a job, their addresses and their devices; imports no TensorFlow."""

from tfpar.cluster.devices import configured_devices, native_messages_to, resolve_devices, use_logical_cpus

__all__ = ["configured_devices", "native_messages_to", "resolve_devices", "use_logical_cpus"]
