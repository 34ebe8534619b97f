"""Writes the golden files of tests/weights/test_families.py again, as transformers computes them
(with PyTorch).

python tests/scripts/golden_files.py            # all cases
python tests/scripts/golden_files.py gemma3     # those that are named
"""

import json
import sys
import tempfile
from pathlib import Path


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "weights"))
    from test_families import CASES, GOLDEN, measure

    for name in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as temporary:
            (GOLDEN / f"{name}.json").write_text(json.dumps(measure(name, Path(temporary))) + "\n")


if __name__ == "__main__":
    main()
