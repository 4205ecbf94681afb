"""Decides by suffix and first bytes how a corpus's file is read, or why it is not text.

Imports no torch.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

from trainer.config import extension
from trainer.config.data import COMPRESSIONS, FILE_KINDS, FileKind
from trainer.data.own_files import is_configuration

HEAD_BYTES = 1 << 16
"""First bytes that decide how a file is read."""
SUFFIX = re.compile(r"[a-z][a-z0-9_+-]{0,15}")
MAX_RECORDS = 20  # of a head
LISTED_KEYS = 12
parse_json = json.JSONDecoder().decode

LFS_POINTER = (
    "a Git LFS pointer, whose data was not downloaded; run `git lfs pull` in its repository"
)
UTF_16 = "UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW"
NOT_READ = "compressed in a way that is not read; decompress it, or compress it by gzip or zstd"
STATE_IT = 'to read it as text, state it in data.files ("**/*" states all)'
JSON_AS_TEXT = f"looks like JSON, not text; {STATE_IT}"
JSON_NOT_LINES = (
    "JSON, but no record on each line; convert an array by jq -c '.[]' OLD > NEW.jsonl and an object by "
    f"jq -c . OLD > NEW.jsonl; {STATE_IT}"
)
OUTSIDE_LINK = "a link that leads out of the corpus; copy what it leads to, or name that as a corpus of its own"

LEFT_OUT_SUFFIXES = {
    "an image": ".png .jpg .jpeg .gif .webp .bmp .tif .tiff .ico .heic .psd",
    "an office document": ".pdf .djvu .doc .docx .xls .xlsx .ppt .pptx .odt .ods .odp .epub .mobi",
    "an archive": ".zip .tar .tgz .tbz2 .txz .7z .rar .whl .jar .deb .rpm .iso .dmg",
    "sound or film": ".mp3 .mp4 .m4a .wav .flac .ogg .opus .avi .mkv .mov .webm",
    "binary data": ".arrow .feather .safetensors .gguf .pkl .pickle .npy .npz .pt .pth .h5 .hdf5 .sqlite .sqlite3 .onnx",
    "compiled": ".so .dll .dylib .exe .pyc .o .class .wasm",
    "a font": ".woff .woff2 .ttf .otf .eot",
}
BINARY_SUFFIXES = {
    suffix: what for what, suffixes in LEFT_OUT_SUFFIXES.items() for suffix in suffixes.split()
}
UNREAD_COMPRESSIONS = ("bz2", "xz", "lzma", "lz4", "br", "z", "sz")
SIGNATURES = {
    "an image": (b"\x89PNG", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"II*\0", b"MM\0*"),
    "a PDF": (b"%PDF-",),
    "an archive": (b"PK\x03\x04", b"7z\xbc\xaf\x27\x1c", b"Rar!\x1a"),
    "compressed": (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh91AY", b"\xfd7zXZ"),
    "a table": (b"ARROW1\0", b"PAR1\x15", b"SQLite format 3\0"),
    "a program": (b"\x7fELF",),
}
"""First bytes of formats that are not text.

Listed are those that may be UTF-8 without a zero byte, and those whose name helps the user.
"""
CARD_KEYS = re.compile(
    rb"^(dataset_info|configs|license|language|tags|task_categories|size_categories|pretty_name|annotations_creators"
    rb"|library_name|pipeline_tag|base_model):",
    re.MULTILINE,
)
DATASET_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json")
OBJECT_START = re.compile(rb'\{\s*"(?:[^"\\\n]|\\.)*"\s*:')
ARRAY_START = re.compile(rb'\[\s*\{\s*"')


# ---- by name


def compression_suffix(name: str) -> str:
    """The suffix of the compression: `.gz`, `.zst` or ""."""
    return next((suffix for suffix in COMPRESSIONS if name.lower().endswith(suffix)), "")


def text_suffix(name: str) -> str:
    """The suffix in lower case, before `.gz` and `.zst`; "" if it has none, or a number."""
    # A suffix begins with a letter, so that neither a version nor a number of a part is one.
    base = base_name(name)
    stem, dot, suffix = base.removesuffix(compression_suffix(base)).rpartition(".")
    return f".{suffix}" if stem and dot and SUFFIX.fullmatch(suffix) else ""


def full_suffix(name: str) -> str:
    """The suffix with that of the compression, in lower case, such as `.json.gz`."""
    return text_suffix(name) + compression_suffix(name)


def kind_of(name: str) -> FileKind:
    suffix = text_suffix(name)
    return "added" if extension.added_source(suffix) else FILE_KINDS.get(suffix, "text")


def is_read_as_before(name: str) -> bool:
    """Whether a file is read as when only `.jsonl` was lines, and suffixes were not in lower
    case.
    """
    # Keys of prepared folders depend on this: a corpus that is read as before is found again.
    stem = name.removesuffix(".gz").removesuffix(".zst")
    before = (
        "table" if stem.endswith(".parquet") else "lines" if stem.endswith(".jsonl") else "text"
    )
    return kind_of(name) == before and name.endswith(compression_suffix(name))


def describe_binary(name: str) -> str:
    """The kind of binary file that this suffix names; "" if the file may be text."""
    return "" if kind_of(name) == "added" else BINARY_SUFFIXES.get(text_suffix(name), "")


def has_unread_compression(name: str) -> bool:
    """Whether a file of text, not an archive, is compressed so that it cannot be read."""
    stem, _, suffix = name.lower().rpartition(".")
    return suffix in UNREAD_COMPRESSIONS and bool(stem) and not stem.endswith(".tar")


def may_be_metadata(name: str) -> bool:
    """Whether the content decides if the file belongs to the corpus."""
    base = base_name(name)
    return base in ("readme.md", *DATASET_DESCRIPTIONS) or base.endswith(".toml")


def describe_metadata(name: str, head: bytes) -> str:
    """The kind of file that describes a corpus or a run; "" for any other file."""
    base = base_name(name)
    if base in DATASET_DESCRIPTIONS:
        return "a description of a Hugging Face dataset"
    if base.endswith(".toml"):
        return "a configuration of Longhaul" if is_configuration(head) else ""
    front_matter = (
        re.match(rb"(?s)(?:\xef\xbb\xbf)?---\r?\n(.*?)\n---", head)
        if base == "readme.md"
        else None
    )
    return "a Hugging Face card" if front_matter and CARD_KEYS.search(front_matter[1]) else ""


def base_name(name: str) -> str:
    return name.rpartition("/")[2].lower()


# ---- by content


class Contents(NamedTuple):
    kind: FileKind
    refusal: str = ""
    """Why the file cannot be part of a corpus: it would be read as what it is not."""
    not_text: str = ""
    """Why the file is no text."""


def is_lfs_pointer(head: bytes) -> bool:
    return head.startswith(b"version https://git-lfs")


def examine(name: str, head: bytes, *, key: str, is_whole: bool, is_stated: bool) -> Contents:
    """Decides by its first bytes, decompressed, how a file is read.

    `is_stated`: JSON other than lines of records with the key is text.
    """
    # Before the search for zero bytes, which UTF-16 has, too: the user must learn the encoding.
    if is_utf_16(head, is_whole=is_whole):
        return Contents(kind_of(name), refusal=UTF_16)
    if kind_of(name) == "lines":
        return examine_lines(name, head, key=key, is_whole=is_whole, is_stated=is_stated)
    if problem := describe_bytes(head):
        return Contents("text", not_text=f"not text: {problem}")
    form = json_form(head, is_whole=is_whole)
    # Lines whose records have the key are read as JSON whatever the suffix; other JSON in a file
    # of text is rather a mistake, unless data.files states it.
    records = first_records(head, is_whole=is_whole) if form == "lines" else []
    if None not in records and key in record_keys(records):
        return Contents("lines")
    if is_stated or not form:
        return Contents("text")
    keys = record_keys(records)
    lacks_key = bool(keys) and key not in keys
    return Contents(
        "text", refusal=f"{describe_keys(keys, key)}; or {STATE_IT}" if lacks_key else JSON_AS_TEXT
    )


def examine_lines(
    name: str, head: bytes, *, key: str, is_whole: bool, is_stated: bool
) -> Contents:
    """Decides how a file is read whose suffix says that a record is on each line."""
    form = json_form(head, is_whole=is_whole)
    is_json = text_suffix(name) == ".json"
    is_wrong = form in ("array", "object") or (form == "" and is_json and not head.isspace())
    if head and is_wrong:
        return Contents("text") if is_stated else Contents("lines", refusal=JSON_NOT_LINES)
    records = first_records(head, is_whole=is_whole)
    keys = record_keys(records)
    # Lines without any key are damaged, and skipped.
    if not keys or key in keys:
        return Contents("lines")
    if is_json and len(records) == 1:  # One object: what a program writes too.
        return (
            Contents("text")
            if is_stated
            else Contents("lines", refusal=f"{describe_keys(keys, key)}; or {STATE_IT}")
        )
    return Contents("lines", refusal=describe_keys(keys, key))


def examine_columns(columns: Sequence[str], *, key: str) -> Contents:
    """Decides by the names of its columns whether a table is read."""
    if key in columns:
        return Contents("table")
    known = ", ".join(columns[:LISTED_KEYS])
    return Contents("table", refusal=f'no column "{key}"; columns: {known}; set data.text_key')


def describe_keys(keys: frozenset[str], key: str) -> str:
    """The refusal of records that have these keys, and not the key of the text."""
    known = ", ".join(sorted(keys)[:LISTED_KEYS])
    return (
        f'no JSON record with the key "{key}" in the first lines; keys: {known}; set data.text_key'
    )


def describe_bytes(head: bytes) -> str:
    """The kind of binary data that the bytes are; "" if they may be text."""
    for what, signatures in SIGNATURES.items():
        if head.startswith(signatures):
            return what
    return (
        "an archive"
        if head[257:262] == b"ustar"
        else "contains a zero byte"
        if b"\0" in head
        else ""
    )


def is_utf_16(head: bytes, *, is_whole: bool) -> bool:
    if not head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return False
    try:
        # Binary data may begin with a byte order mark by chance, but rarely decodes.
        codecs.getincrementaldecoder("utf-16")().decode(head, is_whole)
    except UnicodeDecodeError:
        return False
    return True


def json_form(head: bytes, *, is_whole: bool) -> Literal["", "lines", "array", "object"]:
    """Records on lines, an array of records, or an object over several lines; "" for what does not
    look like JSON.
    """
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    if not text.startswith((b"{", b"[")):
        return ""
    lines = [*complete_lines(text, is_whole=is_whole)]
    first = parse_line(lines[0]) if lines else None
    # An empty object alone on a line is code rather than a record.
    if isinstance(first, dict):
        return "lines" if first else ""
    if ARRAY_START.match(text):
        return "array"
    # A damaged line is followed by other records.
    if OBJECT_START.match(text):
        are_lines = len(lines) < 2 or lines[1].lstrip().startswith(b"{")
        return "lines" if are_lines else "object"
    return ""


def first_records(head: bytes, *, is_whole: bool) -> list[dict[str, Any] | None]:
    """The first lines that are complete; None for one that is no object."""
    lines = islice(
        complete_lines(head.removeprefix(codecs.BOM_UTF8), is_whole=is_whole), MAX_RECORDS
    )
    records = map(parse_line, lines)
    return [record if isinstance(record, dict) else None for record in records]


def record_keys(records: Sequence[dict[str, Any] | None]) -> frozenset[str]:
    return frozenset(key for record in records for key in record or ())


def complete_lines(head: bytes, *, is_whole: bool) -> Iterator[bytes]:
    """The lines that are not blank, without the last one if it may continue after the head."""
    lines = head.split(b"\n")
    yield from (
        line for line in (lines if is_whole else lines[:-1]) if line and not line.isspace()
    )


def parse_line(line: bytes) -> Any:
    try:
        return parse_json(line.decode())
    except (ValueError, RecursionError):
        return None
