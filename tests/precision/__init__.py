"""Rounding errors in bfloat16 as sums get more parts: float64, in which meshes are compared,
cannot show them.
"""
