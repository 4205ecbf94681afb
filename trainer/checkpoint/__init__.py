"""Checkpoints: written beside, verified, committed by a rename, resumed from automatically.

checkpoints    what a run has: when one is due, saves in the background, what it goes on from
staging        the state copied to the host, so that training may change it
writing        one save, in phases that end in an agreement of all ranks
manifest       what a checkpoint consists of, and whether it is whole; imports no torch
verification   the newest checkpoint whose files have their hashes; others are put aside
reading        tensors out of a checkpoint, without executing what may be in it
retention      what is deleted, and what never is; imports no torch
slimming       a checkpoint with the weights alone
"""
