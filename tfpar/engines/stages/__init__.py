"""The steps of stages and shards: a schedule over the devices of a grid."""
