"""What was found, for a screen: a table of speed-ups beside the paper's, and the rest in sentences."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from jaxspec.analysis.h200.decoding import KINDS, TABLE_2
from jaxspec.analysis.h200.results import Results
from jaxspec.analysis.h200.stages import CHEAP, NAMES
from jaxspec.analysis.measure import environment
from jaxspec.analysis.theory import formulas

WIDTH = 128  # columns that the table takes


def rows(results: Results) -> list[dict[str, Any]]:
    """A row for each setting of Table 2 that was measured, with what Theorem 3.8 predicts once c and v are known."""
    found = []
    for setting in TABLE_2:
        speed, costs = results.get(setting.stage), results.get(f"passes-{KINDS[setting.temperature]}")
        if speed is None:
            continue
        row = setting._asdict() | {"measured": speed["speedup"], "after_prefill": speed["speedup_after_prefill"]}
        row |= dict.fromkeys(("c", "v", "theorem", "theorem_v1", "of_these_rounds"))
        if costs is not None:
            c, v = costs["c"], costs["v"][str(setting.gamma)]
            row |= {"c": c, "v": v, "of_these_rounds": speed["passes_saved"] / (setting.gamma * c + v)}
            for name, taken in (("theorem", v), ("theorem_v1", 1.0)):
                row[name] = float(formulas.improvement(setting.alpha, setting.gamma, c, taken))
        found.append(row)
    return found


def table(found: list[dict[str, Any]]) -> Table:
    """Speed-ups: the paper's measured and expected ones, ours, and three predictions with c as measured here.

    Of the predictions one is from the rounds that were needed, and two are from alpha: with v as measured, and with
    v = 1, as the paper's EXP.
    """
    heads = (
        "task",
        "T",
        "γ",
        "α",
        "c",
        "v",
        "paper",
        "EXP",
        "here",
        "min..max",
        "no prefill",
        "rounds",
        "Thm 3.8",
        "v = 1",
    )
    view = Table(*heads, box=box.SIMPLE)
    for row in found:
        whole, after = row["measured"], row["after_prefill"]
        view.add_row(
            *(row["task"], f"{row['temperature']:g}", str(row["gamma"]), f"{row['alpha']:.2f}"),
            *(_number(row["c"], 3), _number(row["v"]), f"{row['speedup']}", f"{row['expected']}"),
            *(f"{whole['median']:.2f}", f"{whole['min']:.2f}..{whole['max']:.2f}", f"{after['median']:.2f}"),
            *(_number(row[name]) for name in ("of_these_rounds", "theorem", "theorem_v1")),
        )
    return view


def notes(results: Results) -> list[str]:
    """The rest, in sentences: what was found, and which stages failed."""
    lines = [*_models(results), *_training(results), *_loading(results)]
    return lines + [f"{name} FAILED: {results.error(name)}" for name in NAMES if results.error(name)]


def _models(results: Results) -> list[str]:
    copied, plain, profile = (results.get(name) for name in ("copy", "plain", "profile"))
    lines = []
    if plain is not None:
        about, each = plain["environment"], plain["token_ms"]
        names = f"{plain['target']['name']} and {plain['draft']['name']}, {plain['target']['dtype']}"
        lines.append(f"{names} · {environment.line(about)}")
        lines.append(f"Plain: {each['median']:.3f} ms a token ({each['min']:.3f}..{each['max']:.3f}).")
    if copied is not None and plain is not None:
        speed = copied["bytes_per_second"]["median"]
        floor = 1e3 * plain["bytes_per_token"] / speed
        lines[-1] = (
            f"{lines[-1][:-1]}; the floor is {floor:.3f} ms ({plain['bytes_per_token'] / 1e9:.2f} GB at "
            f"{speed / 1e12:.2f} TB/s, a copy of {copied['bytes'] / 1e6:.0f} MB): "
            f"{100 * floor / plain['token_ms']['median']:.0f}% of the floor's speed is reached."
        )
    costs = [(kind, results.get(f"passes-{kind}")) for kind in KINDS.values()]
    for kind, found in costs:
        if found is not None and found["c"] > CHEAP:
            lines.append(
                f"c is {found['c']:.3f} ({kind}), above the paper's {CHEAP}: the drafter's pass takes "
                f"{found['draft_ms']:.3f} ms, the target's {found['target_ms']:.3f}."
            )
    if profile is not None:
        lines.append(profile.get("advice", "See the file for the profile."))
    return lines


def _training(results: Results) -> list[str]:
    lines = []
    for name in ("train-target", "train-draft"):
        if (found := results.get(name)) is not None:
            steps = f"{found['steps']} of the recipe's {found['steps_of_the_recipe']} steps"
            lines.append(
                f"{found['recipe']}: {found['parameters'] / 1e6:.1f}M parameters, {steps} in {found['seconds']:.0f} s, "
                f"held-out loss {found['heldout_loss']:.3f}."
            )
    if (found := results.get("measure")) is not None:
        for cell in found["cells"]:
            speed = (cell["speed_after_prefill"] or cell["speed"])["median"]
            lines.append(
                f"T = {cell['temperature']:g}, γ = {cell['chosen_gamma']}: α {cell['alpha']:.3f}, c {cell['c']:.3f}, v "
                f"{cell['v']:.2f}; {speed:.2f}× measured, {cell['predicted']:.2f}× predicted."
            )
    return lines


def _loading(results: Results) -> list[str]:
    written, found = results.get("write"), results.get("load")
    if found is None:
        return []
    same = "the same parameters" if written and written["bits"] == found["bits"] else "OTHER PARAMETERS THAN WRITTEN"
    within = "within one file" if found["extra_over_largest_file"] <= 1 else "MORE THAN ONE FILE"
    return [
        f"Loading {found['parameters_bytes'] / 1e9:.2f} GB from {found['files']} files took {found['seconds']:.0f} s "
        f"and {found['extra_bytes'] / 1e9:.2f} GB of host memory: {found['extra_over_largest_file']:.2f} of the "
        f"largest file ({found['largest_file_bytes'] / 1e9:.2f} GB; {found['measured_by']}), {within}; {same}."
    ]


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"
