"""The engines of replicas: one program on every device, with collectives inside the step."""
