"""What `jaxspec verify` finds of a real pair: greedy texts by dtype, and a test of every rule's samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import RenderableType
from rich.text import Text

from jaxspec.cli import tables
from jaxspec.cli.prompts import heldout_for

if TYPE_CHECKING:
    from jaxspec.accept.catalogue import Ceiling
    from jaxspec.analysis.samples import Samples
    from jaxspec.base import Model, Prompt
    from jaxspec.decode.request import Job

UNLIKELY = 1e-3  # a corrected p-value below this is no accident
UNSURE = 0.05  # how often any of the intervals may miss
FREQUENT = 3  # tokens whose probability gets an interval, in each test
TEMPERATURES = (0.7, 1.0)


class Way(NamedTuple):
    """A way to decode whose samples are tested.

    Attributes:
        name: of the rule.
        exact: what it says it is.
        ceiling: its bound, if it is inexact and states one.
        asked: (prompt, key, temperature) -> the request that decodes so.
    """

    name: str
    exact: bool
    ceiling: Ceiling | None
    asked: Callable[[Prompt, Any, float], Job]


def of_pair(
    names: tuple[str, str],
    *,
    gamma: int,
    count: int,
    new_tokens: int,
    sampled: int,
    draws: int,
    seed: int,
    doing: Callable[[str], object],
) -> dict[str, Any]:
    """Greedy texts in float32 and bfloat16, and samples of every rule in float32.

    Args:
        names: of target and drafter.
        gamma: guesses a round.
        count, new_tokens: prompts whose greedy texts are compared, and how long these are.
        sampled, draws: prompts behind which is sampled, and how often.
        seed: of the samples.
        doing: called with what comes next, once for each dtype and each test.
    """
    from jaxspec import model

    pairs = {dtype: [model.load(name, dtype=dtype) for name in names] for dtype in ("float32", "bfloat16")}
    big, small = pairs["float32"]
    prompts, greedy = prompts_of(big, count), {}
    for dtype, (target, draft) in pairs.items():
        doing(f"greedy, {dtype}")
        greedy[dtype] = numerics_of(target, draft, prompts, gamma, new_tokens)
    samples = samples_of(big, small, shortest(prompts, sampled), gamma, draws, seed, doing)
    right = all(test["as_stated"] for test in samples["tests"]) and not greedy["float32"]["parted"]
    return {"target": names[0], "draft": names[1], "numerics": greedy, "samples": samples, "as_stated": right}


def steps_of(sampled: int) -> int:
    """How often `of_pair` calls `doing`."""
    return 2 + len(TEMPERATURES) * sampled * len(list(ways(None, None, 1)))


def prompts_of(target: Model, count: int) -> Prompt:
    """The first held-out prompts, as token ids."""
    from jaxspec.decode import request

    return request.encode(target, heldout_for(target, count))


def shortest(prompts: Prompt, count: int) -> Prompt:
    """The shortest prompts, which are the cheapest to sample behind, no wider than they need be."""
    import numpy as np

    from jaxspec import buffers
    from jaxspec.base import Prompt

    rows = np.argsort(np.asarray(prompts.length), kind="stable")[:count]
    width = min(buffers.bucket(int(prompts.length[rows].max())), prompts.tokens.shape[1])
    return Prompt(prompts.tokens[rows][:, :width], prompts.length[rows])


def numerics_of(target: Model, draft: Model, prompts: Prompt, gamma: int, new_tokens: int) -> dict[str, Any]:
    """Where greedy texts part from plain decoding's, and by what margin."""
    from jaxspec.analysis import numerics

    parted = numerics.divergences(target, draft, prompts, gamma=gamma, max_new_tokens=new_tokens)
    first = numerics.first(parted)
    return {
        "prompts": len(prompts.length),
        "same": len(prompts.length) - len(parted),
        "first": None if first is None else first._asdict(),
        "largest_top_two_margin": max((parting.top_two_margin for parting in parted), default=None),
        "parted": [parting._asdict() for parting in parted],
    }


def ways(target: Any, draft: Any, gamma: int) -> Iterator[Way]:
    """Plain decoding, which shows what chance does, and every rule of the catalogue."""
    from jaxspec.accept import catalogue
    from jaxspec.analysis import samples
    from jaxspec.base import Weights
    from jaxspec.decode.warping import plan
    from jaxspec.testing import independent, proposing

    def chain(**options: Any) -> Callable[[Prompt, Any, float], Job]:
        return lambda prompt, key, t: samples.job(target, prompt, key, temperature=t, gamma=gamma, **options)

    def at_once(judge: catalogue.Step) -> Callable[[Prompt, Any, float], Job]:
        def asked(prompt: Prompt, key: Any, temperature: float) -> Job:
            warp = plan(target, samples.BATCH, temperature=temperature).warp
            decoder = proposing(target.lm, (draft.lm,), independent(2), warp, judge)
            plain = samples.job(target, prompt, key, temperature=temperature)
            return plain._replace(decoder=decoder, weights=Weights(target.params, (draft.params,)))

        return asked

    yield Way("plain decoding", True, None, chain())
    for rule, ceiling in catalogue.CHAINS.values():
        yield Way(rule.name, rule.exact, ceiling, chain(drafter=draft, accept=rule))
    for name, judge in catalogue.STEPS.items():
        yield Way(f"{name}, 2 samples", True, None, at_once(judge))


def samples_of(
    target: Model, draft: Model, prompts: Prompt, gamma: int, draws: int, seed: int, doing: Callable[[str], object]
) -> dict[str, Any]:
    """A test for each way to decode, temperature and prompt; p-values corrected for how many tests there are."""
    import jax

    from jaxspec.analysis import holm, samples

    key, tests = jax.random.key(seed), []
    for row in range(len(prompts.length)):
        one = jax.tree.map(lambda x, row=row: x[row : row + 1], prompts)
        first, behind = jax.random.split(jax.random.fold_in(key, row))
        for temperature in TEMPERATURES:
            place = samples.place(target, one, first, temperature=temperature, draws=draws)
            for number, way in enumerate(ways(target, draft, gamma)):
                doing(f"{way.name}, T = {temperature:g}")
                own = jax.random.fold_in(behind, number)
                drawn = samples.draw(way.asked(one, first, temperature), place.first, own, draws)
                tests.append({"rule": way.name, "exact": way.exact, "temperature": temperature, "prompt": row})
                tests[-1] |= _tested(place, drawn, way)
    for test, pvalue in zip(tests, holm.corrected([test["pvalue"] for test in tests]), strict=True):
        test |= {"corrected": pvalue, "as_stated": pvalue > UNLIKELY}
    about = {"draws": tests[0]["draws"], "prompts": len(prompts.length), "temperatures": list(TEMPERATURES)}
    about |= {"false_alarm": UNLIKELY, "confidence": 1 - UNSURE}
    return about | {"tests": with_intervals(tests)}


def _tested(place: Any, drawn: Samples, way: Way) -> dict[str, Any]:
    import numpy as np

    from jaxspec.analysis import ceiling, chisquare
    from jaxspec.analysis.samples import EXPECTED

    if way.exact:
        found = {"test": "chi-square"} | chisquare.fit(place, drawn.tokens)._asdict()
    elif way.ceiling is not None:
        found = {"test": "bound"} | ceiling.check(place, drawn.tokens, way.ceiling)._asdict()
    else:
        raise ValueError(f"the rule {way.name} is inexact and states no bound: give its catalogue.Entry a ceiling")
    likeliest = np.argsort(-place.after, kind="stable")[:FREQUENT]
    often = [x for x in likeliest.tolist() if place.after[x] * len(drawn.tokens) >= EXPECTED]
    seen = np.bincount(drawn.tokens[:, 0], minlength=len(place.after))
    frequent = [{"token": x, "target": float(place.after[x]), "seen": int(seen[x])} for x in often]
    return found | {"acceptance_rate": drawn.acceptance_rate, "frequent": frequent}


def with_intervals(tests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Intervals for how probable frequent tokens are, which all together hold it with 95% confidence (Bonferroni)."""
    from jaxspec.analysis import binomial

    error = UNSURE / max(sum(len(test["frequent"]) for test in tests), 1)
    for test in tests:
        for token in test["frequent"]:
            token["low"], token["high"] = binomial.interval(token["seen"], test["draws"], error)
    return tests


def shown(pair: dict[str, Any]) -> list[RenderableType]:
    """What to print of a pair."""
    samples = pair["samples"]
    about = f"{samples['prompts']} prompts, {samples['draws']} draws of two tokens behind each"
    return [
        Text(f"\n{pair['target']}, drafted for by {pair['draft']}:", "bold"),
        _numerics_table(pair["numerics"]),
        _samples_table(samples["tests"], f"samples against the target's law: {about}"),
        Text(
            f"p is the least of a rule's p-values, all {len(samples['tests'])} corrected for their number (Holm): χ² "
            "tests of fit, and for inexact rules binomial tests of their bound. Below "
            f"{samples['false_alarm']:g} is no accident. Intervals are Clopper and Pearson's, for the probability of "
            f"the {FREQUENT} likeliest first tokens of each test; all of them together hold it with "
            f"{samples['confidence']:.0%} confidence (Bonferroni)."
        ),
    ]


def _numerics_table(numerics: dict[str, Any]) -> RenderableType:
    heads = ["same text", "first divergence: prompt", "new token", "top-two margin there", "largest such margin"]
    table = tables.table(heads, first="greedy", title="greedy texts against plain decoding's, margins in nats")
    for dtype, found in numerics.items():
        same, first = f"{found['same']} of {found['prompts']}", found["first"]
        if first is None:
            table.add_row(dtype, same, "none", "–", "–", "–")
            continue
        margins = f"{first['top_two_margin']:.3g}", f"{found['largest_top_two_margin']:.3g}"
        table.add_row(dtype, same, str(first["row"]), str(first["position"]), *margins)
    return table


def _samples_table(tests: list[dict[str, Any]], title: str) -> RenderableType:
    heads = ["T", "guesses kept", "p", "farthest token: target", "interval", "intervals that hold it", "verdict"]
    table = tables.table(heads, first="rule", title=title)
    groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for test in tests:
        groups.setdefault((test["rule"] + ("" if test["exact"] else ", inexact"), test["temperature"]), []).append(test)
    for (name, temperature), group in sorted(groups.items(), key=lambda item: item[0][1]):
        kept = sum(test["acceptance_rate"] for test in group) / len(group)
        tokens = [(token, test["draws"]) for test in group for token in test["frequent"]]
        cells = ["–", "–", "–"]
        if tokens:
            far, _ = max(tokens, key=lambda pair: abs(pair[0]["seen"] / pair[1] - pair[0]["target"]))
            held = sum(token["low"] <= token["target"] <= token["high"] for token, _ in tokens)
            cells = [f"{far['target']:.3f}", f"{far['low']:.3f}..{far['high']:.3f}", f"{held} of {len(tokens)}"]
        right = all(test["as_stated"] for test in group)
        verdict = Text("as stated", "green") if right else Text("WRONG", "bold red")
        least = min(test["corrected"] for test in group)
        table.add_row(name, f"{temperature:g}", f"{kept:.0%}", f"{least:.3g}", *cells, verdict)
    return table
