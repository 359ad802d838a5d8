"""The GPUs of a host: which a process sees, their memory, and who uses them."""
