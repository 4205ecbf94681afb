"""What the processes run that tests of interruptions kill. They import only this."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable

from torch import Tensor

from trainer.config.source import CorpusSpec
from trainer.data import corpus
from trainer.data.prepare import prepare
from trainer.data.text_chunks import EncodingError
from trainer.data.tokenizer import ByteTokenizer

STEPS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")
PARTITION_BYTES = 60


def killed(work: Callable[[], object], step: int) -> None:
    left = step

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        reading = event == "open" and (
            len(arguments) < 3 or not int(str(arguments[2])) & (os.O_WRONLY | os.O_RDWR)
        )
        left -= event in STEPS and not reading
        if left < 0 and event in STEPS:
            os.kill(os.getpid(), signal.SIGKILL)

    vars(os)["fsync"] = int
    sys.addaudithook(count)
    work()


class Preparing:
    """A picklable call of `prepare`."""

    def __init__(self, source: CorpusSpec, workers: int = 1) -> None:
        self.source = source
        self.workers = workers

    def __call__(self) -> None:
        corpus.PARTITION_BYTES = PARTITION_BYTES
        prepare(self.source, ByteTokenizer(), workers=self.workers, shard_tokens=150)


class Fatal(ByteTokenizer):
    """At a text that starts with `text`: raises, or kills its own or its parent process."""

    def __init__(self, text: str, target: str) -> None:
        self.text = text
        self.target = target

    def encode(self, text: str) -> Tensor:
        parent = multiprocessing.parent_process()
        if text.startswith(self.text):
            if self.target == "error":
                raise EncodingError("no such text")
            if self.target == "bug":
                raise ZeroDivisionError("a bug")
            assert parent is not None
            os.kill(
                int(parent.pid or 0) if self.target == "parent" else os.getpid(), signal.SIGKILL
            )
        return super().encode(text)


class Doomed(Preparing):
    def __call__(self) -> None:
        corpus.PARTITION_BYTES = PARTITION_BYTES
        prepare(self.source, Fatal("3 of c", "parent"), workers=2, shard_tokens=150)
