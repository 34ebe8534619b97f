"""Makes the data of the Debian recipes, and their tokenizers.

    python -m data_prep.debian --data data
    python -m data_prep.debian --data data --releases bullseye,trixie,forky,sid --catalogues

The descriptions are fetched with apt-get (on Debian or Ubuntu; no root needed, the system's lists
stay as they are), or read from the folder of --lists. Some minutes of one core; --catalogues
fetches 0.7 GB of packages.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from data_prep import debian


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line and makes the files; ends with one line where something is
    missing.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder to write to")
    parser.add_argument("--lists", type=Path, help="description indices, instead of fetching them")
    parser.add_argument(
        "--releases", default="", help="other Debian releases to add texts of: trixie,sid"
    )
    parser.add_argument(
        "--catalogues", action="store_true", help="also pairs from catalogues and manuals"
    )
    options = parser.parse_args(arguments)
    releases = tuple(filter(None, options.releases.split(",")))
    try:
        debian.prepare(options.data, options.lists, releases, options.catalogues)
    except (OSError, ImportError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
