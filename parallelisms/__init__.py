"""Floor 2: the device mesh, and every parallelism, recomputation and offload that a model runs under."""
