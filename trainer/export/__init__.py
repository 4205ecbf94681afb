"""Commands that read checkpoints: Hugging Face import and export, export of the weights alone, and text generation."""
