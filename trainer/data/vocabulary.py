"""The number of embeddings that a model needs for a tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.data.tokenizer import Tokenizer


def text_vocab_size(tokenizer: Tokenizer, separators: str = "bos_eos") -> int:
    """One more than the largest id in any document: of its text, or of the tokens before and after
    it.

    Special tokens above are in none, such as the image of Gemma 3, for which its 1B model has no
    embedding.
    """
    around_documents = {tokenizer.bos, tokenizer.eos, tokenizer.special_tokens.get(separators)}
    in_no_document = {*tokenizer.special_tokens.values()} - around_documents
    size = tokenizer.vocab_size
    while size - 1 in in_no_document:
        size -= 1
    return size


def tokens_without_embedding(tokenizer: Tokenizer, vocab_size: int) -> list[str]:
    """Special tokens that a model with this vocabulary cannot take."""
    above = {
        token: name for name, token in tokenizer.special_tokens.items() if token >= vocab_size
    }
    return [f"{token} ({name})" for token, name in sorted(above.items())]
