"""Floor 2: where it is computed. The mesh, and what spreads a model over it."""
