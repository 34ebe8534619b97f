"""Widgets for notebooks: the speed-up landscape, the residual distribution, and a count of rounds
that shows no bias.

    explore_landscape(alpha=0.7, gamma=5, c=0.2)   sliders move a dot; tokens, cost, speed-up, best gamma
    explore_residual(p, q)                         one draft token a round: step, run 1,000, reset
    explore_unbiasedness(p, q, gamma=4)            several draft tokens a round: L1 distance, tokens accepted

They need matplotlib and ipywidgets, which are imported when a widget is drawn: `pip install
".[notebooks]"`. Without ipywidgets each is drawn once. The rounds are decided by a rule of the
library, so a wrong one can be seen to be wrong.

Shapes: B rounds, G gamma, V vocabulary.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key
from numpy.typing import ArrayLike

from jaxspec import optional_imports, rules
from jaxspec.analysis import divergence, formulas
from jaxspec.core import Distribution, Draft, Rule, noise, programs

GREEN, BLUE, RED, PURPLE, ORANGE = "#009E73", "#0072B2", "#D55E00", "#8F5AA5", "#E69F00"
LEVELS = (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8)  # speed-ups that have a line on the map
LARGEST_GAMMA = 16  # of the map
BATCH = 1000  # rounds that are played at once


class Slider(NamedTuple):
    """A slider's first value, its ends and its step. It moves in whole numbers if the step is an
    int.
    """

    value: float
    low: float
    high: float
    step: float


class Dot(NamedTuple):
    """A pair on the map, such as a measured one."""

    name: str
    alpha: float
    gamma: int


class Readouts(NamedTuple):
    """The numbers of one point of the map.

    Attributes:
        tokens: expected tokens of a round, Equation 1.
        cost: time of a round, in one-token passes of the target.
        speed_up: tokens / cost, Theorem 3.8.
        best_gamma: the gamma with the largest speed-up at this alpha and c; 0 where plain decoding
            is fastest.
    """

    tokens: float
    cost: float
    speed_up: float
    best_gamma: int

    @classmethod
    def of(cls, alpha: float, gamma: int, c: float, check: float = 0.0) -> Readouts:
        """Computes them; `check` is what each further token adds to the verify pass, 0 in the
        paper.

        >>> [round(value, 2) for value in Readouts.of(alpha=0.7, gamma=5, c=0.2)]
        [2.94, 2.0, 1.47, 3]
        """
        verify = 1 + check * np.arange(LARGEST_GAMMA + 1)
        cost = gamma * c + verify[gamma]
        tokens = float(formulas.expected_tokens(alpha, gamma))
        return cls(
            tokens, float(cost), tokens / float(cost), int(formulas.optimal_gamma(alpha, c, verify))
        )

    def __str__(self) -> str:
        if self.best_gamma:
            best = f"best γ {self.best_gamma}"
        else:
            best = "best: plain decoding"
        return (
            f"{self.tokens:.2f} tokens a round, cost {self.cost:.2f}, speed-up "
            f"{self.speed_up:.2f}×, {best}"
        )


class CountedRounds:
    """Rounds of speculative decoding from one pair of distributions, counted.

    Every position has the same target distribution p and the same draft distribution q. A rule
    judges gamma draft tokens, drawn from q. The first token of each round is counted: its
    distribution must be p.

    Attributes:
        counts: how often each token came first [V].
        accepted: draft tokens accepted in all rounds.
        path: (rounds, L1 distance) after every `BATCH` rounds of a call of `run`, and at its end.

    Example:
        >>> rounds = CountedRounds([0.5, 0.3, 0.2], [0.2, 0.6, 0.2], gamma=2)
        >>> rounds.run(500)
        >>> int(rounds.counts.sum()), rounds.l1 < 0.2, round(rounds.expected_accepted, 2)
        (500, True, 1.19)
    """

    def __init__(
        self, p: ArrayLike, q: ArrayLike, gamma: int = 1, rule: Rule | None = None, seed: int = 0
    ) -> None:
        self.p = np.asarray(p, np.float64)
        self.q = np.asarray(q, np.float64)
        self.alpha = float(divergence.beta(self.p, self.q))
        self.gamma = gamma
        self.rule = rule or rules.rejection()
        self.key = jax.random.key(seed)
        self.reset()

    def reset(self) -> None:
        """Forgets all rounds. The next ones are the first ones again."""
        self.counts: Int[np.ndarray, " V"] = np.zeros(len(self.p), np.int64)
        self.accepted = 0
        self.path: list[tuple[int, float]] = []

    def run(self, count: int) -> None:
        """Plays `count` more rounds."""
        logs = [
            jnp.log(jnp.asarray(probabilities, jnp.float32)) for probabilities in (self.p, self.q)
        ]
        for begin in range(0, count, BATCH):
            key = jax.random.fold_in(self.key, self.rounds)
            first, num_accepted = _played(self.rule, key, self.gamma, *logs)
            # One program serves all counts; rounds that are too many are not looked at.
            last = min(count - begin, BATCH)
            self.counts += np.bincount(np.asarray(first)[:last], minlength=len(self.p))
            self.accepted += int(num_accepted[:last].sum())
            self.path.append((self.rounds, self.l1))

    @property
    def rounds(self) -> int:
        """The number of rounds so far."""
        return int(self.counts.sum())

    @property
    def shares(self) -> Float[np.ndarray, " V"]:
        """The share of each token among the first tokens; 0 before the first round."""
        return self.counts / max(self.rounds, 1)

    @property
    def l1(self) -> float:
        """The sum of |share - p|; NaN before the first round."""
        if self.rounds:
            return float(np.abs(self.shares - self.p).sum())
        return float("nan")

    @property
    def mean_accepted(self) -> float:
        """The draft tokens accepted in a round, on average; NaN before the first round."""
        if self.rounds:
            return self.accepted / self.rounds
        return float("nan")

    @property
    def expected_accepted(self) -> float:
        """The draft tokens that `rules.rejection` accepts in a round: Equation 1 less the token of
        the target's.
        """
        return float(formulas.expected_tokens(self.alpha, self.gamma)) - 1

    def chance(self, rounds: ArrayLike) -> np.ndarray:
        """Computes nearly the mean L1 distance of as many samples of p itself: sum of sqrt(2 p (1 -
        p) / (pi n)).
        """
        return np.sqrt(2 * self.p * (1 - self.p) / np.pi).sum() / np.sqrt(
            np.asarray(rounds, np.float64)
        )


@programs.jit(static_argnames=("rule", "gamma"))
def _played(
    rule: Rule,
    key: Key[Array, ""],
    gamma: int,
    log_p: Float[Array, " V"],
    log_q: Float[Array, " V"],
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Plays `BATCH` rounds. Returns the first token of each and the number of its accepted draft
    tokens.
    """
    keys = noise.row_keys(key, BATCH)
    position = jnp.zeros(BATCH, jnp.int32)
    rows_p = jnp.broadcast_to(log_p, (BATCH, gamma + 1, *log_p.shape))
    rows_q = jnp.broadcast_to(log_q, (BATCH, gamma, *log_q.shape))
    # Each draft token is drawn at its own position, as in a text.
    columns = [
        noise.categorical(noise.at(keys, position + i, noise.Purpose.DRAFT), rows_q[:, i])  # [B]
        for i in range(gamma)
    ]
    draft = Draft(jnp.stack(columns, axis=1), jnp.full(BATCH, gamma, jnp.int32), log_probs=rows_q)
    verdict = rule.verify(keys, position, draft, Distribution(rows_p))
    first = jnp.where(verdict.num_accepted > 0, draft.tokens[:, 0], verdict.next_token)
    return first, verdict.num_accepted


# --- pictures


def picture(figure: Any) -> Any:
    """Makes an image of a matplotlib figure, and closes the figure."""
    display = _imported("IPython.display", "notebooks")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90)
    _pyplot().close(figure)
    return display.Image(buffer.getvalue())


def landscape(
    c: float,
    check: float,
    marks: Sequence[Dot | tuple[str, float, int]] = (),
    title: str = "",
    point: tuple[float, int] | None = None,
) -> Any:
    """Draws the speed-up for each alpha and gamma, with the best gamma for each alpha.

    Args:
        c: one pass of the drafter, in one-token passes of the target.
        check: the time that each further token adds to the verify pass; 0 in the paper.
        marks: pairs to name on the map.
        title: c and check by default, or the readouts of `point`.
        point: alpha and gamma of a white dot, which sliders move.

    Returns:
        An image for `IPython.display.display`.
    """
    colors = _imported("matplotlib.colors", "figures")
    alpha = np.linspace(0, 1, 301)
    gammas = np.arange(1, LARGEST_GAMMA + 1)
    verify = 1 + check * gammas
    speed = formulas.improvement(alpha[None, :], gammas[:, None], c, verify[:, None])
    figure, axes = _pyplot().subplots(figsize=(6.6, 4.2), layout="constrained")
    # The same speed-up has the same colour in every map.
    scale = colors.LogNorm(1 / 12, 12)
    mesh = axes.pcolormesh(alpha, gammas, speed, cmap="cividis", norm=scale, shading="nearest")
    bar = figure.colorbar(mesh, label="speed-up over plain decoding", ticks=LEVELS, format="%g×")
    bar.ax.minorticks_off()
    levels = [level for level in LEVELS if speed.min() < level < speed.max()]
    if levels:  # a draft token may cost so much that all of the map is one colour
        widths = [2.0 if level == 1 else 0.8 for level in levels]
        lines = axes.contour(alpha, gammas, speed, levels=levels, colors="white", linewidths=widths)
        for label in axes.clabel(lines, levels[:-1] or levels, fmt="%g×", fontsize=8):
            # none is upside down: a 6 is no 9
            label.set_rotation((label.get_rotation() + 80) % 180 - 80)
    best = formulas.optimal_gamma(alpha, c, np.concatenate([[1.0], verify]))
    axes.plot(
        alpha,
        np.where(best > 0, best, np.nan),
        color="black",
        drawstyle="steps-post",
        label="best γ",
    )
    for name, pair_alpha, pair_gamma in marks:
        axes.plot(pair_alpha, pair_gamma, "o", color=RED, markeredgecolor="white", markersize=9)
        label = dict(
            xytext=(-9, 0), textcoords="offset points", ha="right", va="center", fontsize=8
        )
        axes.annotate(
            name, (pair_alpha, pair_gamma), bbox=dict(facecolor="white", edgecolor="none"), **label
        )
    if point is not None:
        readouts = Readouts.of(point[0], point[1], c, check)
        title = title or str(readouts)
        axes.plot(
            *point,
            "o",
            color="white",
            markeredgecolor="black",
            markersize=10,
            zorder=5,
            clip_on=False,
        )
        # the same point on the stripe of colours
        bar.ax.axhline(readouts.speed_up, color=RED, linewidth=3)
    axes.set(
        xlabel="acceptance rate α", ylabel="draft tokens a round γ", ylim=(0.5, LARGEST_GAMMA + 0.5)
    )
    axes.set_title(title or f"c = {c:g}, check = {check:g}", fontsize=10)
    axes.legend(loc="upper left")
    return picture(figure)


def draw_residual(rounds: CountedRounds, words: Sequence[str] | None = None) -> Any:
    """Draws p, q and the shares of the first tokens, three bars a token, with accepted, rejected
    and residual mass.
    """
    figure, axes = _pyplot().subplots(figsize=(7.4, 3.8), layout="constrained")
    places = np.arange(len(rounds.p))
    both = np.minimum(rounds.p, rounds.q)
    width = 0.27
    axes.bar(places - width, both, width, color=GREEN, label="min(p, q): accepted")
    axes.bar(
        places - width,
        rounds.p - both,
        width,
        bottom=both,
        color=BLUE,
        label="p − min(p, q): residual",
    )
    axes.bar(places, both, width, color=GREEN, alpha=0.45)
    rejected = dict(facecolor="none", edgecolor=RED, hatch="////", linewidth=0.8)
    axes.bar(
        places, rounds.q - both, width, bottom=both, label="q − min(p, q): rejected", **rejected
    )
    axes.bar(places + width, rounds.shares, width, color=ORANGE, label="share of the tokens so far")
    # p again across the three bars, since the shares have to reach it.
    axes.hlines(
        rounds.p, places - 1.5 * width, places + 1.5 * width, color="black", linewidth=1, label="p"
    )
    axes.set_xticks(places, words or [f"{token}" for token in places])
    axes.set(
        ylabel="probability",
        ylim=(0, 1.35 * max(rounds.p.max(), rounds.q.max(), rounds.shares.max())),
    )
    numbers = [
        f"Z = {1 - rounds.alpha:.3f}",
        f"α = {rounds.alpha:.3f}",
        f"{rounds.rounds:,} samples",
    ]
    if rounds.rounds:
        numbers += [f"accepted {rounds.mean_accepted / rounds.gamma:.3f}", f"L1 = {rounds.l1:.3f}"]
    axes.set_title(", ".join(numbers), fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return picture(figure)


def draw_unbiasedness(rounds: CountedRounds) -> Any:
    """Draws the L1 distance after each run beside what samples of p itself would have."""
    figure, axes = _pyplot().subplots(figsize=(7.4, 3.4), layout="constrained")
    counts = np.geomspace(10, max(1e5, rounds.rounds), 50)
    axes.plot(
        counts,
        rounds.chance(counts),
        color="gray",
        linestyle=":",
        label="samples of p itself, on average",
    )
    if rounds.path:
        axes.plot(
            *np.array(rounds.path).T,
            "o-",
            color=BLUE,
            markersize=4,
            label=f"first tokens of the rounds, {rounds.rule.name}",
        )
    axes.set(xscale="log", yscale="log", xlabel="rounds", ylabel="L1 distance to p")
    numbers = [f"{rounds.rounds:,} rounds"]
    if rounds.rounds:
        accepted = f"{rounds.mean_accepted:.3f} of {rounds.gamma} accepted"
        numbers += [f"{accepted} (theory: {rounds.expected_accepted:.3f})", f"L1 = {rounds.l1:.4f}"]
    axes.set_title(", ".join(numbers), fontsize=10)
    axes.legend(frameon=False)
    return picture(figure)


# --- widgets


def explore_landscape(
    alpha: float = 0.8,
    gamma: int = 5,
    c: float = 0.05,
    check: float = 0.0,
    marks: Sequence[Dot | tuple[str, float, int]] = (),
) -> None:
    """Shows the map with sliders for alpha, gamma, c and check, and a dot that they move."""

    def draw(alpha: float, gamma: int, c: float, check: float) -> Any:
        return landscape(c, check, marks, point=(alpha, gamma))

    sliders = {
        "alpha": Slider(alpha, 0.0, 1.0, 0.01),
        "gamma": Slider(gamma, 1, LARGEST_GAMMA, 1),
        "c": Slider(c, 0.0, 0.5, 0.01),
        "check": Slider(check, 0.0, 1.0, 0.02),
    }
    explore(draw, **sliders)


def explore_residual(
    p: ArrayLike,
    q: ArrayLike,
    words: Sequence[str] | None = None,
    rule: Rule | None = None,
    samples: int = 0,
) -> None:
    """Shows how the residual distribution fills up p, one draft token a round, after `samples`
    rounds at first.
    """
    rounds = CountedRounds(p, q, rule=rule)
    rounds.run(samples)
    buttons = {
        "step": lambda: rounds.run(1),
        "run 1,000": lambda: rounds.run(1000),
        "reset": rounds.reset,
    }
    explore(lambda: draw_residual(rounds, words), buttons)


def explore_unbiasedness(
    p: ArrayLike, q: ArrayLike, gamma: int = 4, rule: Rule | None = None, count: int = 5000
) -> None:
    """Shows that first tokens have the distribution p, and how many draft tokens a round
    accepts.
    """
    rounds = CountedRounds(p, q, gamma, rule)
    rounds.run(count)
    explore(
        lambda: draw_unbiasedness(rounds),
        {f"run {count:,}": lambda: rounds.run(count), "reset": rounds.reset},
    )


def explore(
    draw: Callable[..., Any],
    buttons: Mapping[str, Callable[[], object]] | None = None,
    /,
    **sliders: Slider | tuple[float, float, float, float],
) -> None:
    """Displays what `draw` returns, and draws it again whenever a slider is moved or a button is
    pressed.

    Args:
        draw: takes the sliders' values by name. Returns an object for `IPython.display.display`.
        buttons: functions to call before the picture is drawn again, by the words on each button.
        **sliders: value, low, high and step of each. Underscores of names become blanks.
    """
    display = _imported("IPython.display", "notebooks")
    try:
        widgets = importlib.import_module("ipywidgets")
    except ImportError:
        print("The sliders need ipywidgets: pip install ipywidgets")
        display.display(draw(**{name: slider[0] for name, slider in sliders.items()}))
        return
    controls = {name: _control(widgets, name, Slider(*slider)) for name, slider in sliders.items()}
    output = widgets.Output()

    def show(_: object = None) -> None:
        with output:
            display.clear_output(wait=True)
            display.display(draw(**{name: control.value for name, control in controls.items()}))

    for control in controls.values():
        control.observe(show, "value")
    pressed = [_button(widgets, words, action, show) for words, action in (buttons or {}).items()]
    half = -(-len(controls) // 2)
    columns = [list(controls.values())[:half], list(controls.values())[half:]]
    display.display(
        widgets.HBox([*(widgets.VBox(column) for column in columns if column), *pressed]), output
    )
    show()


def _control(widgets: Any, name: str, slider: Slider) -> Any:
    if isinstance(slider.step, int):
        make = widgets.IntSlider
    else:
        make = widgets.FloatSlider
    label = name.replace("_", " ")
    return make(
        slider.value,
        min=slider.low,
        max=slider.high,
        step=slider.step,
        description=label,
        continuous_update=False,
    )


def _button(
    widgets: Any, words: str, action: Callable[[], object], show: Callable[[], None]
) -> Any:
    button = widgets.Button(description=words)

    def press(_: object) -> None:
        action()
        show()

    button.on_click(press)
    return button


def _pyplot() -> Any:
    return _imported("matplotlib.pyplot", "figures")


def _imported(module: str, extra: str) -> Any:
    """Imports a module of an extra."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(optional_imports.missing(package, extra)) from error
