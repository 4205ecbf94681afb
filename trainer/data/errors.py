"""What is wrong with data or a tokenizer, in words for whoever chose them."""


class DataError(ValueError):
    """Data or a tokenizer's file that cannot be used. Trying again does not mend it."""
