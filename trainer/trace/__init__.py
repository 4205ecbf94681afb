"""Memory, FLOPs and messages of a training step, from the code that runs it on fake tensors.

`record` runs the real trainer on a model of a few blocks and a few micro-batches; `compose`
repeats what it recorded for the whole step.
"""
