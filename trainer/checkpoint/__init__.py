"""Checkpoints: saved asynchronously, verified by hash, committed by a rename, resumed from automatically.

manager          when to save, saves in progress, what to prune
staging          device-to-host copy of the state, so that training can continue during a save
save             one save in phases; every phase ends in an agreement of all ranks; `_commit` renames the folder
resume           verify the newest checkpoint, quarantine damaged ones, load the rest of the state
load             read tensors without executing what a checkpoint may contain
initial_weights  weights that a new run starts from
manifest         the files of a checkpoint and their hashes; imports no torch
retention        which checkpoints are deleted; imports no torch
run_dir          paths of the run folder, and which run it belongs to; imports no torch
"""
