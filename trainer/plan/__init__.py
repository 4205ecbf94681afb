"""What a run will cost on a cluster that is not there, and which mesh to take."""
