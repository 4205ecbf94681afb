"""What is wrong with data or a tokenizer, in words for whoever chose them."""


class DataError(ValueError):
    """Data or a tokenizer's file that cannot be used. Trying again does not mend it."""


def needs(package: str, what: object) -> DataError:
    return DataError(f'{what} needs {package}: pip install "longhaul[data]", or pip install {package}')
