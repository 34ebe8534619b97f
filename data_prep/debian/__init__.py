"""The training data of the recipes that come with jaxspec: Debian's package descriptions.

`index` fetches and reads them, `examples` makes the files of the recipes, `edits` those of one more
task, `catalogues` more German, from other texts in Debian's packages, `prompts` the held-out
prompts that are shipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from data_prep.debian import catalogues, edits, examples, index, tokenizers

TOKENIZERS = ("tokenizer-t5", "tokenizer-gpt")


def prepare(
    data: Path,
    lists: Path | None = None,
    releases: Sequence[str] = (),
    wider: bool = False,
    log: Callable[[str], object] = print,
) -> None:
    """Makes the data files of the recipes, and their tokenizers if they are not there yet."""
    if lists is None:
        lists = data / "lists"
        index.fetch(lists)
    counts = examples.build(lists, data) | edits.build(data)
    if releases:
        index.fetch(data / "releases", releases=releases)
        counts |= examples.build_releases(lists, data / "releases", data)
    if wider:
        if missing := catalogues.fetch(data / "packages"):
            log(
                f"{len(missing)} packages were not to be had (`apt-get update` first?): "
                f"{', '.join(missing)}"
            )
        counts |= catalogues.build(data / "packages", data)
    for file, rows in counts.items():
        log(f"{data / file}: {rows:,} rows")
    folders = [data / name for name in TOKENIZERS]
    if all((folder / "tokenizer.json").is_file() for folder in folders):
        log(
            "the tokenizers are there already, and are not made again: models trained with them "
            "fit no others"
        )
        return
    tokenizers.train_tokenizers(data, folders[0], folders[1])
    log(f"tokenizers: {', '.join(map(str, folders))}")
