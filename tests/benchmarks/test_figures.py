"""The pictures show what theory says, and are written completely."""

import sys

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from benchmarks import figures as draw
from benchmarks.figures import sampling, style
from benchmarks.figures.spans import Span
from benchmarks.figures.theory import Mark
from benchmarks.figures.timeline import COLOURS
from jaxspec import rules
from jaxspec.analysis import divergence, formulas


def curve(line, at):
    return float(np.interp(at, line.get_xdata(), line.get_ydata()))


def by_label(figure):
    return {line.get_label(): line for line in figure.axes[0].lines}


def test_figure_2_has_the_curves_of_equation_1():
    lines = by_label(draw.expected_tokens())
    assert list(lines) == ["γ = 1", "γ = 3", "γ = 5", "γ = 7", "γ = 10", "γ = ∞"]
    assert curve(lines["γ = 5"], 0.8) == pytest.approx(3.69, abs=0.005)  # Table 1
    assert curve(lines["γ = ∞"], 0.5) == pytest.approx(2.0)


def test_figure_3_has_the_best_gammas():
    lines = by_label(draw.optimal_gamma([0.01, 0.1]))
    for c in (0.01, 0.1):
        assert curve(lines[f"c = {c:g}"], 0.7) == formulas.optimal_gamma(0.7, c)


def test_figure_4_has_speeds_and_operations_of_theory():
    lines = draw.trade_off([2, 10]).axes[0].lines
    at = [curve(line, 0.9) for line in lines[:4]]
    # Table 1: speed, operations; speed, operations
    assert at == pytest.approx([2.71, 1.11, 6.86, 1.60], abs=0.005)
    assert [line.get_linestyle() for line in lines[:4]] == ["-", "--", "-", "--"]


def test_a_landscape_shows_the_speeds_and_the_best_gamma_of_theory():
    figure = draw.landscape(
        0.05, lambda gamma: 1 + 0.1 * gamma, [Mark("left", 0.9, 3), Mark("right", 0.1, 2)], most=8
    )
    axes = figure.axes[0]
    speed = axes.collections[0].get_array().reshape(8, -1)
    assert speed[4, 300] == pytest.approx(float(formulas.improvement(0.75, 5, 0.05, 1.5)))
    best = curve(by_label(figure)["best γ"], 0.75)
    assert best == formulas.optimal_gamma(0.75, 0.05, lambda gamma: 1 + 0.1 * gamma, most=8)
    sides = {text.get_text(): text.get_ha() for text in axes.texts}
    assert (sides["left"], sides["right"]) == ("right", "left")  # beside the point, inside the axes


def test_landscapes_can_be_compared():
    """One speed, one colour, wherever a slider stands; and no 6 stands on its head."""
    draw.landscape(5.0, lambda gamma: 200.0 * gamma)  # no line of equal speed is in this map
    dear, cheap = draw.landscape(0.4).axes[0], draw.landscape(0.05).axes[0]
    norms = [axes.collections[0].norm for axes in (dear, cheap)]
    assert norms[0](1.0) == norms[1](1.0) == pytest.approx(0.5)
    labels = {text.get_text(): text.get_rotation() for text in cheap.texts}
    assert "6×" in labels and all(-80 <= (turn + 180) % 360 - 180 < 100 for turn in labels.values())


def test_decomposition_keeps_the_order_of_words_that_are_all_shown():
    """A bar that a slider grows stays where it is."""
    axes = draw.decomposition([0.1, 0.9], [0.5, 0.5], list("ab")).axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["a", "b"]


def test_decomposition_adds_up_to_the_targets_distribution():
    p, q = np.array([0.1, 0.6, 0.3, 0.0]), np.array([0.5, 0.1, 0.3, 0.1])
    axes = draw.decomposition(p, q, list("abcd"), most=3).axes[0]
    accepted, residual, rejected = axes.containers
    # the largest, by p
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["b", "c", "a"]
    np.testing.assert_allclose(
        [a.get_height() + r.get_height() for a, r in zip(accepted, residual, strict=True)],
        [0.6, 0.3, 0.1],
    )
    assert sum(bar.get_height() for bar in rejected) == pytest.approx(0.4)
    assert f"{float(divergence.beta(p, q)):.2f}" in axes.get_title()


def test_distances_of_samples_are_drawn_by_their_number():
    figure = draw.distribution_distance([1, 10], {"a": np.array([1.0, 0.5])}, np.array([0.9, 0.3]))
    assert by_label(figure)["a"].get_ydata().tolist() == [1.0, 0.5]


def test_a_trace_diagram_has_a_bar_for_each_block():
    spans = [Span("target prefill", 0.0, 5.0), Span("draft", 5.0, 1.0), Span("target", 6.0, 4.0)]
    axes = draw.trace_diagram({"γ = 1": spans, "plain": spans[:1]}).axes[0]
    boxes = axes.collections[0].get_paths()
    assert [path.get_extents().width for path in boxes] == pytest.approx([5.0, 1.0, 4.0])
    assert [text.get_text() for text in axes.texts] == ["10 ms", "5 ms"]
    assert set(COLOURS) == {"target prefill", "draft prefill", "draft", "target"}


def test_files_are_the_same_each_time(tmp_path):
    first = style.save(draw.optimal_gamma([0.1]), tmp_path / "a", "figure")
    again = style.save(draw.optimal_gamma([0.1]), tmp_path / "b", "figure")
    assert [path.name for path in first] == ["figure.png", "figure.svg"]
    assert first[0].read_bytes().startswith(b"\x89PNG") and b"<svg" in first[1].read_bytes()
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]


def test_nothing_is_left_half_written(tmp_path, monkeypatch):
    figure = draw.optimal_gamma([0.1])

    def breaks(path, **options):
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(figure, "savefig", breaks)
    with pytest.raises(OSError, match="disk full"):
        style.save(figure, tmp_path, "figure")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("formats", [["pdf"], []])
def test_unknown_formats_are_refused(tmp_path, formats):
    with pytest.raises(ValueError, match="expected some of png, svg"):
        style.save(draw.optimal_gamma([0.1]), tmp_path, "figure", formats)


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "\.\[figures\]"'):
        style.canvas()


# --- sampled frequencies

P, Q = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
ROUNDS = 20_000


def test_the_rejection_rule_approaches_the_targets_distribution():
    tokens = sampling.first_tokens(rules.rejection(), P, Q, ROUNDS, seed=1)
    near, far = sampling.l1_distance(tokens, P, [ROUNDS, 20])
    assert near < 4 * sampling.noise_distance(P, ROUNDS) < far


def test_a_lenient_rule_stays_away():
    """By the L1 distance of its own known distribution: what is accepted, plus what is not times
    the residual.
    """
    tokens = sampling.first_tokens(rules.lenient(0.5), P, Q, ROUNDS, seed=1)
    accepted = np.minimum(np.array(P) / 0.5, Q)
    mixture = accepted + (1 - accepted.sum()) * divergence.residual(P, Q)
    assert sampling.l1_distance(tokens, P, [ROUNDS])[0] == pytest.approx(
        np.abs(mixture - P).sum(), abs=0.02
    )


def test_noise_distance_is_the_mean_for_samples():
    rng = np.random.default_rng(0)
    distances = [sampling.l1_distance(rng.choice(3, 400, p=P), P, [400])[0] for _ in range(200)]
    assert np.mean(distances) == pytest.approx(sampling.noise_distance(P, 400), rel=0.1)


@pytest.mark.parametrize("counts", [[0, 1], [5]])
def test_counts_that_there_are_not(counts):
    with pytest.raises(ValueError, match="expected 1 to 4"):
        sampling.l1_distance(np.zeros(4, int), [1.0], counts)
