"""Whether [tokenizer] gives the ids that a model's weights were trained on, before any worker
starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.checkpoint.initial_weights import is_absent, is_hugging_face, resolve_initial_path
from trainer.config.checks import require_vocab_size, tokenizer_problems
from trainer.config.data import tokenizer_folder
from trainer.config.job_config import BYTE_VOCAB_SIZE, Config
from trainer.errors import ConfigError, DataError
from trainer.storage.run_dir import RunDir

if TYPE_CHECKING:
    from trainer.data.tokenizer import Tokenizer

# Contractions, numbers, case, code, line ends, combining and wide characters: tokenizers differ in
# how they cut these.
PROBE = (
    "The quick brown fox doesn't jump, it'll WAIT: 3.14159, 12345678 and x_1.\n\n"
    "def f(x):\n    return {'a': [x, 2]}  # done\r\n\tnaïve Ünï ﬁ 中文字符 日本語 한국어 العربية हिन्दी 🙂 e\u0301 \u00a0\u2003x ..."
)
MAX_LISTED = 3


def validate_initial_tokenizer(config: Config) -> None:
    """Raises `ConfigError` if a new run would train a Hugging Face model on ids of another
    tokenizer than its own.
    """
    initial = config.checkpoint.initial_load_path
    if initial is None or not is_hugging_face(initial) or config.data.is_synthetic:
        return
    if is_absent(initial, config.data.cache_dir):
        return
    folder = resolve_initial_path(initial, config.data.cache_dir)
    has_checkpoint = (
        config.checkpoint.enabled and RunDir(config.output_dir).committed_checkpoints()
    )
    if has_checkpoint or not folder.is_dir() or any(tokenizer_problems(config.tokenizer)):
        return
    try:
        problems = [*_differences(config, folder)]
    except DataError as error:
        problems = error.problems
    if problems:
        raise ConfigError(
            [f'checkpoint.initial_load_path = "{initial}": {problem}' for problem in problems]
        )


def _differences(config: Config, folder: Path) -> Iterator[str]:
    from trainer.data.hf_tokenizer import detect_tokenizer
    from trainer.data.tokenizer import load_tokenizer, open_tokenizer
    from trainer.data.vocabulary import text_vocab_size

    detected = detect_tokenizer(folder)
    kind = config.tokenizer.kind
    path = config.tokenizer.path
    if detected is None:
        if kind == "byte" and config.model.build().vocab_size != BYTE_VOCAB_SIZE:
            yield (
                f'tokenizer.kind = "byte" has {BYTE_VOCAB_SIZE} tokens, but the model {config.model.build().vocab_size} '
                "and no tokenizer in its folder: set [tokenizer] to the one it was trained with"
            )
        return
    tokenizer = open_tokenizer(config.tokenizer)
    # Else reported with the problems of data.
    if kind != "byte":
        require_vocab_size(config, text_vocab_size(tokenizer, config.data.separators))
    own_kind, own_path = detected
    if (
        kind == own_kind == "huggingface"
        and path
        and tokenizer_folder(path).resolve() == folder.resolve()
    ):
        return
    if problems := [*_id_differences(tokenizer, load_tokenizer(*detected))]:
        own_path_value = f' and tokenizer.path = "{own_path}"' if own_path else ""
        yield f'tokenizer.kind = "{kind}": {"; ".join(problems)}; set tokenizer.kind = "{own_kind}"{own_path_value}'


def _id_differences(tokenizer: Tokenizer, own: Tokenizer) -> Iterator[str]:
    """Differences in ids between a tokenizer and the model's own, one line each."""
    # Equal files settle it; two files of one tokenizer may differ, so ids of a probe text are
    # compared.
    if tokenizer.fingerprint == own.fingerprint:
        return
    own_special = {*own.special_tokens.values(), own.eos, own.bos}
    for role, token in (("first", tokenizer.bos), ("last", tokenizer.eos)):
        if token is not None and token not in own_special:
            yield f"the {role} token of documents, {token}, is no special token of the model's tokenizer"
    shared = tokenizer.special_tokens.keys() & own.special_tokens.keys()
    moved = [
        name
        for name in sorted(shared)
        if tokenizer.special_tokens[name] != own.special_tokens[name]
    ]
    for name in moved[:MAX_LISTED]:
        ids = tokenizer.special_tokens[name], own.special_tokens[name]
        yield f'special token "{name}" is {ids[0]}, but {ids[1]} for the model'
    probe, own_probe = (each.encode(PROBE).tolist() for each in (tokenizer, own))
    if probe != own_probe:
        # The first difference: all later ids follow from it.
        place = next(
            (
                at
                for at, pair in enumerate(zip(probe, own_probe, strict=False))
                if pair[0] != pair[1]
            ),
            0,
        )
        given = probe[place : place + 4]
        expected = own_probe[place : place + 4]
        yield f"a probe text gives ids {given}, but {expected} with the model's tokenizer"
