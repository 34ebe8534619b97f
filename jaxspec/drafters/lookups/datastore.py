"""Datastores: token sequences and their suffix array, which `drafters.retrieval` searches.

A folder with tokens.npy, suffixes.npy (plain NumPy files, which map into memory) and manifest.toml.
Documents follow one another: token t is stored as t + 1, and a 0 ends each document. A suffix is a
position in that sequence; sorted by the tokens from there on, all occurrences of any run of tokens
are neighbours, and bisection finds them.

Shapes: N tokens and document ends, M suffixes (the positions of tokens).
"""

from __future__ import annotations

import dataclasses
import hashlib
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxspec import optional_imports
from jaxspec.core import token_ids
from jaxspec.files import folders, strict_tables
from jaxspec.files.folders import MANIFEST

FORMAT = 1
FILES = ("tokens.npy", "suffixes.npy")
# bytes that are sorted: the sorter's indices, and those on the device, have 32 bits
LARGEST = 2**31 - 1


class DatastoreError(ValueError):
    """A datastore cannot be written or read; the message names its contents and the expected ones."""


@dataclasses.dataclass(frozen=True)
class DatastoreManifest:
    """The contents of manifest.toml."""

    format: int  # version of the folder's layout
    vocab_size: int  # number of token ids
    # these two: how many there are
    documents: int
    tokens: int
    # SHA-256 of the tokenizer's tokens in the order of their ids; empty if there was no tokenizer
    vocabulary: str
    files: dict  # [size in bytes, SHA-256] of the other files
    about: dict  # where the texts come from; plain values


class Datastore(NamedTuple):
    """Documents and their suffix array."""

    # each token plus 1, each document followed by a 0; of the smallest type that holds them
    tokens: Int[np.ndarray, " N"]
    # the positions of tokens, in the order of what stands from there on
    suffixes: Int[np.ndarray, " M"]
    vocab_size: int  # number of token ids
    vocabulary: str = ""  # see `DatastoreManifest`


def build(
    rows: Sequence[Sequence[int] | np.ndarray],
    *,
    vocab_size: int,
    begin: Sequence[int] = (),
    vocabulary: str = "",
    advance: Callable[[], object] = lambda: None,
) -> Datastore:
    """Builds a datastore from rows of token ids; each row is a document.

    Args:
        rows: rows as a decoder would hold them; each gets `begin` in front.
        vocab_size: number of token ids.
        begin: the ids that a decoder's row begins with where its prompt is elsewhere
            (`Limits.first_tokens`).
        vocabulary: the digest of the vocabulary; see `DatastoreManifest`.
        advance: called when the tokens are in place, and when they are sorted: twice.

    Raises:
        DatastoreError: no tokens, an id outside of the vocabulary, or more tokens than 32-bit
            indices reach.
        ModuleNotFoundError: pydivsufsort is not installed.

    >>> store = build([[1, 0, 1], [0, 1]], vocab_size=2)
    >>> store.tokens.tolist(), store.suffixes.tolist()
    ([2, 1, 2, 0, 1, 2, 0], [4, 1, 5, 2, 0])
    """
    try:
        from pydivsufsort import divsufsort  # an extra: searching a datastore needs no sorter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            optional_imports.missing("pydivsufsort", "datastore"), name=error.name
        ) from error

    first = np.array(begin, np.int64)
    parts = [np.concatenate([first, np.asarray(row, np.int64)]) for row in rows]
    ids = np.concatenate(parts) if parts else first
    if not len(ids):
        raise DatastoreError(
            f"got {len(rows)} documents and no tokens: expected at least one token"
        )
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise DatastoreError(
            f"the ids range from {ids.min()} to {ids.max()}: expected 0 to {vocab_size - 1}"
        )
    dtype = np.dtype(np.uint16 if vocab_size < 2**16 else np.uint32)
    if (len(ids) + len(parts)) * dtype.itemsize > LARGEST:
        raise DatastoreError(
            f"got {len(ids):,} tokens in {len(rows):,} documents: a datastore holds at most "
            f"{LARGEST // dtype.itemsize:,} of both together"
        )
    tokens = np.insert((ids + 1).astype(dtype), np.cumsum([len(document) for document in parts]), 0)
    advance()
    # The order of big-endian numbers is that of their bytes, so a sorter of byte strings will do;
    # of its suffixes those count which begin with a token's first byte.
    suffixes = divsufsort(tokens.astype(dtype.newbyteorder(">")).view(np.uint8))
    suffixes = suffixes[suffixes % dtype.itemsize == 0] // dtype.itemsize
    suffixes = suffixes[tokens[suffixes] > 0].astype(np.int32)
    advance()
    return Datastore(tokens, suffixes, vocab_size, vocabulary)


def save(
    folder: str | Path, store: Datastore, provenance: dict[str, Any], *, overwrite: bool = False
) -> DatastoreManifest:
    """Writes a datastore: the whole folder, or nothing.

    Args:
        folder: where to.
        store: the result of `build`.
        provenance: `DatastoreManifest.about`: strings, numbers, booleans and lists of these.
        overwrite: whether a datastore that is there already may be replaced.

    Raises:
        DatastoreError: `folder` exists already.
    """
    folder = Path(folder).expanduser().resolve()
    complaint = folders.occupied(folder, "datastore", overwrite)
    if complaint:
        raise DatastoreError(complaint)
    with folders.whole(folder) as beside:
        for file, array in zip(FILES, (store.tokens, store.suffixes), strict=True):
            np.save(beside / file, array, allow_pickle=False)
        documents = len(store.tokens) - len(store.suffixes)
        counts = store.vocab_size, documents, len(store.suffixes), store.vocabulary
        manifest = DatastoreManifest(FORMAT, *counts, folders.fingerprints(beside), provenance)
        text = folders.to_toml(dataclasses.asdict(manifest))
        (beside / MANIFEST).write_text(text, encoding="utf-8", newline="\n")
    return manifest


def load(folder: str | Path) -> Datastore:
    """Opens a datastore: its files are read once, to check them, and its arrays then mapped into
    memory, not copied.

    Raises:
        DatastoreError: the datastore is missing or damaged.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp()) / "store"
        >>> _ = save(
        ...     folder, build([[1, 0, 1], [0, 1]], vocab_size=2), {"texts": "none to speak of"}
        ... )
        >>> load(folder).suffixes.tolist()
        [4, 1, 5, 2, 0]
    """
    folder = Path(folder).expanduser()
    manifest = read_manifest(folder)
    complaint = folders.damage(folder, manifest.files)
    if complaint:
        raise DatastoreError(f"{folder} is damaged: {complaint}. Copy or build the datastore again")
    tokens, suffixes = (np.load(folder / file, mmap_mode="r", allow_pickle=False) for file in FILES)
    if tokens.shape != (manifest.tokens + manifest.documents,) or suffixes.shape != (
        manifest.tokens,
    ):
        raise DatastoreError(
            f"{folder} holds {tokens.shape} tokens and {suffixes.shape} suffixes, and its "
            f"{MANIFEST} says {manifest.tokens} tokens in {manifest.documents} documents. Build "
            "the datastore again"
        )
    return Datastore(tokens, suffixes, manifest.vocab_size, manifest.vocabulary)


def read_manifest(folder: str | Path) -> DatastoreManifest:
    """Reads a datastore's manifest, and checks it."""
    folders.recover(Path(folder))
    path = Path(folder) / MANIFEST
    if not path.is_file():
        raise DatastoreError(
            f"no datastore at {folder}: expected a folder that `jaxspec datastore` wrote"
        )
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        if "family" in table:
            raise ValueError("it is a checkpoint's, and not a datastore's")
        manifest = strict_tables.build(DatastoreManifest, table, "it")
        if manifest.format != FORMAT:
            raise ValueError(
                f"format is {manifest.format!r}, this version of jaxspec reads format {FORMAT}"
            )
        complaint = folders.ill_formed(manifest.files)
        if complaint:
            raise ValueError(complaint)
        if sorted(manifest.files) != sorted(FILES):
            raise ValueError(f"[files] lists {sorted(manifest.files)}, expected {sorted(FILES)}")
    except ValueError as error:  # TOML's and Unicode's are such
        raise DatastoreError(
            f"the manifest {path} cannot be used: {error}. Build the datastore again"
        ) from error
    return manifest


def vocabulary_of(tokenizer: Any) -> str:
    """Computes the SHA-256 of a tokenizer's tokens in the order of their ids: equal where ids mean
    the same.
    """
    return hashlib.sha256(
        "\0".join(map(str, token_ids.words(tokenizer))).encode("utf-8", "surrogatepass")
    ).hexdigest()
