"""Floor 1: what is computed. A model knows nothing of ranks, meshes or steps."""
