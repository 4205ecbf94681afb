"""The model and its attention kernels. Nothing here knows of ranks, meshes or steps."""
