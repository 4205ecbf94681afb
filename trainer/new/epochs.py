"""How often a new run reads its corpus, before anything is tokenized. Imports no torch."""

from __future__ import annotations

from trainer.config.job_config import Config
from trainer.config.source import corpus_specs
from trainer.data.corpus_files import CorpusFiles, is_local_text

BYTES_PER_TOKEN = 4
"""English text has about this many, with a vocabulary of 32K to 256K tokens."""
MAX_EPOCHS = 4
"""Up to four epochs are about as good as new text (Muennighoff et al. 2023, arXiv:2305.16264)."""
MIN_STEPS = 10
"""One of them is the warmup."""


def estimated_tokens(config: Config) -> int | None:
    """Tokens in the corpora of a run, by the sizes of their files; None if one of them is not
    text on this machine. Compressed files have more.
    """
    specs = corpus_specs(config).values()
    if not specs or not all(map(is_local_text, specs)):
        return None
    size = sum(file.size for spec in specs for file in CorpusFiles(spec).files)
    return size // (1 if config.tokenizer.kind == "byte" else BYTES_PER_TOKEN)


def enough_steps(corpus_tokens: int | None, tokens_per_step: int, limit: int) -> int:
    """Steps that read the corpora MAX_EPOCHS times, at most `limit`."""
    if corpus_tokens is None:
        return limit
    return min(limit, max(MIN_STEPS, MAX_EPOCHS * corpus_tokens // tokens_per_step))


def describe_repetition(corpus_tokens: int | None, tokens_per_step: int, steps: int) -> str | None:
    """The line that warns of corpora that are read more than MAX_EPOCHS times."""
    if corpus_tokens is None:
        return None
    epochs = steps * tokens_per_step / max(corpus_tokens, 1)
    if epochs <= MAX_EPOCHS:
        return None
    return (
        f"the corpus has about {corpus_tokens:,} tokens: {steps:,} steps of {tokens_per_step:,} read it "
        f"{epochs:,.0f} times; add text, or lower training.steps or training.global_batch_size"
    )
