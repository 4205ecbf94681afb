"""Out of a checkpoint: Hugging Face folders, weights alone, generated text."""
