"""What a checkpoint is worth: commands beside training, on the path that training takes."""
