"""Golden trajectories: losses and gradient norms of small runs, which show numerical drift between
commits.
"""
