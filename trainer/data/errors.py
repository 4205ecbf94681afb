"""What is wrong with data or a tokenizer, in words for whoever chose them."""

import sys


class DataError(ValueError):
    """Data or a tokenizer's file that cannot be used. Trying again does not mend it."""


def missing_package(package: str, what: object) -> DataError:
    return DataError(f"{what} needs {package}: {sys.executable} -m pip install {package}")
