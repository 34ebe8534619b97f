"""`jaxspec plan --tree`: the tree that a pair should draft here, and timed beside the best chain."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from jaxspec.cli import console

if TYPE_CHECKING:
    from jaxspec.decode.request import Prepared


def show(prepared: Prepared, batch: int, nodes: int, repeats: int, timed: bool, as_json: bool) -> None:
    """Plans, and prints the plan.

    Args:
        prepared, nodes, batch, repeats: as `tree_plan.of_prepared` takes them.
        timed: whether the tree and the chain also decode, interleaved with plain decoding.
        as_json: prints one JSON object.
    """
    from jaxspec.analysis import bench, table, tree_plan

    with Console(stderr=True).status("measuring acceptance by rank, and passes"):
        found = tree_plan.of_prepared(prepared, nodes=nodes, batch=batch, repeats=repeats)
    speeds = []
    if timed:
        config = bench.Config(len(prepared.prompt.length), repeats=3, quantities=("speed", "costs"))
        with console.progress(remaining=True) as bar:
            shown = bar.add_task("timing", total=1.0)
            doing = lambda what, share: bar.update(shown, description=what, completed=share)  # noqa: E731
            speeds = list(
                bench.run(prepared.target, tree_plan.settings(found, prepared, batch), config=config, doing=doing)
            )
    if as_json:
        return console.print_measured(**tree_plan.to_dict(found), timed=speeds)
    out = Console(highlight=False, soft_wrap=True)
    out.print(tree_plan.sentence(found))
    if speeds:
        for made in table.tables(speeds, (table.SPEED, table.THEORY), out.width):
            out.print(made)
