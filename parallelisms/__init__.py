"""The device mesh, every parallelism, activation checkpointing and offload: how a model is
distributed.
"""
