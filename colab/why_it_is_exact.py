# %% [markdown]
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxspec/jaxspec/blob/main/colab/why_it_is_exact.ipynb)
# [![Open In Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/jaxspec/jaxspec/blob/main/colab/why_it_is_exact.ipynb)

# %%
# @title Install jaxspec, and print what it runs on
# Where jaxspec is missing, pip installs it: from a checkout that the notebook lies in or beside,
# from a wheel or zip that was uploaded to this folder, or from this address, which a fork changes
# (`repo_url` in mkdocs.yml).
REPOSITORY = "https://github.com/jaxspec/jaxspec"

import glob
import importlib.metadata
import os
import shutil
import subprocess
import sys

# A kernel that has loaded one of these cannot go on with another version.
CANNOT_CHANGE = ("numpy", "scipy", "ml_dtypes", "jax", "jaxlib", "flax", "transformers", "psutil")


class Stop(Exception):
    """Ends a cell, and all that were to run after it, with a sentence in place of a traceback."""

    def _render_traceback_(self):  # IPython asks for this
        return [str(self)]


def installed_version(package):
    """The version of a package that is installed now; None if it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def loaded_version(package):
    """The version of a package that this kernel has loaded; None if it has not."""
    return getattr(sys.modules.get(package), "__version__", None)


def requirement():
    """What pip is asked for: a checkout, else a file that was uploaded, else the repository, with
    the chip's extra.
    """
    has_tpu = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    chip = "cuda," if shutil.which("nvidia-smi") else "tpu," if has_tpu else ""
    extras = f"[{chip}figures]"
    for folder in (".", "..", *sorted(glob.glob("jaxspec*/"))):
        if os.path.isfile(f"{folder}/pyproject.toml") and os.path.isfile(
            f"{folder}/jaxspec/__init__.py"
        ):
            return folder + extras
    uploaded = [
        file for ending in ("whl", "zip", "tar.gz") for file in glob.glob(f"jaxspec*.{ending}")
    ]
    if uploaded:
        return f"./{max(uploaded, key=os.path.getmtime)}{extras}"
    return f"jaxspec-decoding{extras} @ git+{REPOSITORY}"


def pip_arguments():
    """The requirement, and the NumPy that is here: a kernel that has loaded it cannot go on with
    another.
    """
    numpy = loaded_version("numpy") or installed_version("numpy")
    keeps_numpy = numpy is not None and int(numpy.split(".")[0]) >= 2  # which jaxspec needs
    return [requirement(), *([f"numpy=={numpy}"] if keeps_numpy else [])]


def changed_packages():
    """Says of each package that this kernel has loaded which other version of it is installed
    now.
    """
    importlib.invalidate_caches()
    versions = [
        (package, loaded_version(package), installed_version(package)) for package in CANNOT_CHANGE
    ]
    return [
        f"{package} {now} is installed and this kernel has loaded {loaded}"
        for package, loaded, now in versions
        if None not in (loaded, now) and loaded != now
    ]


if installed_version("jaxspec-decoding") is None:
    arguments = pip_arguments()
    print("pip install", *arguments, "(a minute or two)")
    command = [sys.executable, "-m", "pip", "install", "--quiet", *arguments]
    pip = subprocess.run(command, capture_output=True, text=True)
    if pip.returncode != 0:
        print(pip.stdout + pip.stderr)
        raise Stop("pip did not install jaxspec: its last lines above say why.")
if changed_packages():
    raise Stop(f"Runtime > Restart, then run this cell again: {', '.join(changed_packages())}.")

import jax

import jaxspec
from jaxspec.core import programs

programs.keep()  # on disk: what is compiled here, the next kernel need not compile
SMOKE = bool(os.environ.get("JAXSPEC_SMOKE"))  # shorter loops, for tests
device = jax.devices()[0]
print(
    f"jaxspec {jaxspec.__version__}, jax {jax.__version__}, {jax.device_count()} x "
    f"{device.device_kind}"
)

# %% [markdown]
# # Why it is exact
#
# Speculative decoding draws tokens from one model, the draft, and ends up with the distribution of
# another, the target. Here is how, for one token and two distributions over a few words: first in a
# picture, then in samples, and at the end by counting every case.

# %%
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import display

from jaxspec.analysis.widgets import (
    CountedRounds,
    explore,
    explore_residual,
    explore_unbiasedness,
    picture,
)

GREEN, BLUE, RED, PURPLE = "#009E73", "#0072B2", "#D55E00", "#8F5AA5"
WORDS = ["the", "a", "cat", "dog", "sat"]
p = np.array([0.40, 0.25, 0.15, 0.15, 0.05])  # the target's probabilities of the next word
q = np.array([0.20, 0.45, 0.10, 0.05, 0.20])  # the draft's


def residual(p, q):
    """What p has more than q, scaled to sum to 1; p itself where that is nothing."""
    more = np.maximum(p - q, 0)
    return more / more.sum() if more.sum() > 0 else p


# %% [markdown]
# ## The picture
#
# The draft draws a draft token x from q. It is accepted with probability min(1, p(x) / q(x)). So x
# is drafted *and* accepted with probability q(x) · min(1, p(x) / q(x)) = min(p(x), q(x)): the green
# part. It never exceeds p(x), and what it lacks is the blue part, p(x) − min(p(x), q(x)).
#
# How often is a draft token rejected? As often as the red hatched parts together: where q is too
# large, q(x) − p(x). The blue parts have the same sum, since p and q both sum to 1. So if every
# rejected draft token is replaced by a draw from the blue part, scaled to sum to 1 (the *residual*
# distribution), blue fills up with exactly its own mass. Green and blue together are p.
#
# The sliders set the weights of each word; they are scaled to sum to 1.


# %%
def distributions(**weights):
    """The two distributions that the sliders set."""
    sides = [np.array([weights[f"{side}_{word}"] for word in WORDS]) for side in "pq"]
    return [side / side.sum() for side in sides]


def draw(**weights):
    p, q = distributions(**weights)
    at, accepted = np.arange(len(WORDS)), np.minimum(p, q)
    figure, axes = plt.subplots(figsize=(5.4, 4.8), layout="constrained")
    axes.bar(at, accepted, color=GREEN, label="accepted draft tokens: min(p, q)")
    axes.bar(at, p - accepted, bottom=accepted, color=BLUE, label="residual: p − min(p, q)")
    over = q > p
    hatched = dict(facecolor="none", edgecolor=RED, hatch="////", linewidth=0.8)
    axes.bar(
        at[over],
        (q - p)[over],
        bottom=p[over],
        label="rejected draft tokens: q − min(p, q)",
        **hatched,
    )
    axes.hlines(
        p,
        at - 0.4,
        at + 0.4,
        color="black",
        linewidth=2,
        label="the target's distribution p: the sum of both",
    )
    axes.set_xticks(at, WORDS)
    axes.set(ylabel="probability", ylim=(0, 1))
    axes.set_title(
        f"a draft token is accepted with probability Σ min(p, q) = {accepted.sum():.2f}",
        fontsize=10,
    )
    figure.legend(loc="outside lower center", frameon=False)
    return picture(figure)


sides = {f"p_{word}": (x, 0.01, 1.0, 0.01) for word, x in zip(WORDS, p, strict=True)}
sides |= {f"q_{word}": (x, 0.01, 1.0, 0.01) for word, x in zip(WORDS, q, strict=True)}
explore(draw, **sides)

# %% [markdown]
# The same in numbers. Whatever p and q are, accepted and replaced mass add up to p:

# %%
accepted = np.minimum(p, q)
beta = accepted.sum()  # the probability that a draft token is accepted
replaced = (1 - beta) * residual(p, q)

print(f"{'word':6}{'p':>8}{'q':>8}{'accepted':>10}{'replaced':>10}{'sum':>8}")
for row in zip(WORDS, p, q, accepted, replaced, accepted + replaced, strict=True):
    print("{:6}{:8.2f}{:8.2f}{:10.2f}{:10.2f}{:8.2f}".format(*row))
print(f"a draft token is accepted with probability {beta:.2f}")

random = np.random.default_rng(0)
for _ in range(1000):
    some_p, some_q = random.dirichlet(np.ones(5), size=2)
    overlap = np.minimum(some_p, some_q)
    assert np.allclose(overlap + (1 - overlap.sum()) * residual(some_p, some_q), some_p)

# %% [markdown]
# ## Step by step
#
# Eight words. Of each the first bar is p, the second q, the third the share among the words that
# came out. `step` plays one round with the library's rule, `rejection`; each line is p, which the
# orange bars have to reach. Z is the mass that is rejected, 1 − α.

# %%
p_8 = np.array([0.28, 0.20, 0.15, 0.12, 0.10, 0.07, 0.05, 0.03])
q_8 = np.array([0.10, 0.30, 0.08, 0.18, 0.03, 0.15, 0.06, 0.10])
explore_residual(p_8, q_8, words=[*WORDS, "ran", "on", "home"], samples=100)

# %% [markdown] With several draft tokens a round, the first word of every round has the
# distribution p, too. The L1 distance, the sum over words of |share − p|, falls like that of
# samples of p itself. How many draft tokens a round accepts follows from α. Give it
# `rule=jaxspec.rules.lenient(0.5)`, which is marked inexact, and the distance stops falling.

# %%
explore_unbiasedness(p_8, q_8, gamma=4)

exact = CountedRounds(p_8, q_8, gamma=4)
lenient = CountedRounds(p_8, q_8, gamma=4, rule=jaxspec.rules.lenient(0.5))
for rounds in (exact, lenient):
    rounds.run(5000)
    accepted_tokens = f"{rounds.mean_accepted:.2f} of {rounds.gamma} draft tokens accepted"
    print(
        f"{rounds.rule.name:13} L1 {rounds.l1:.3f}, by chance {rounds.chance(5000):.3f}; "
        f"{accepted_tokens}"
    )
assert abs(exact.mean_accepted - exact.expected_accepted) < 0.1
assert exact.l1 < 3 * exact.chance(5000) < lenient.l1

# %% [markdown]
# ## Many rounds
#
# This is the algorithm for one draft token, in NumPy. It has two switches, each a mistake that has
# been made in real programs: drawing from p again after a rejection, and drafting the most probable
# word while pretending that it was drawn from q. The text looks fine either way.


# %%
def rounds(count, seed, again_from_p=False, likeliest=False):
    """The words of `count` independent rounds."""
    random = np.random.default_rng(seed)
    drafted = np.full(count, np.argmax(q)) if likeliest else random.choice(len(q), size=count, p=q)
    accepted = random.random(count) * q[drafted] < p[drafted]
    instead = p if again_from_p else residual(p, q)  # max(0, p - q), scaled to sum to 1
    return np.where(accepted, drafted, random.choice(len(p), size=count, p=instead))


COUNT = 10_000 if SMOKE else 1_000_000
words = {
    "right": rounds(COUNT, seed=0),
    "wrong: no residual": rounds(COUNT, seed=1, again_from_p=True),
    "wrong: argmax scored with q": rounds(COUNT, seed=2, likeliest=True),
}

# %% [markdown] Take 10, 100, 1,000 and more of the rounds, and see the shares of the words settle:
# the right rule's on p (black lines), the wrong one's beside it.


# %%
def shares(power_of_10):
    count = 10**power_of_10
    figure, axes = plt.subplots(figsize=(7.0, 3.5), layout="constrained")
    names = list(words)[:2]
    for name, shift, colour in zip(names, (-0.2, 0.2), (GREEN, BLUE), strict=True):
        share = np.bincount(words[name][:count], minlength=len(p)) / count
        axes.bar(np.arange(len(p)) + shift, share, 0.38, color=colour, label=name)
    axes.hlines(
        p, np.arange(len(p)) - 0.4, np.arange(len(p)) + 0.4, color="black", linewidth=2, label="p"
    )
    axes.set_xticks(range(len(p)), WORDS)
    axes.set(ylabel="share of the words", ylim=(0, 1), title=f"{count:,} rounds")
    axes.legend(frameon=False)
    return picture(figure)


explore(shares, power_of_10=(3, 1, int(np.log10(COUNT)), 1))

# %% [markdown] The L1 distance is the sum over words of |share − p|. Random samples of p itself
# come closer as one over the square root of their number: the dotted line. The right rule follows
# it. So does `rejection`, the rule of the library, which does the same with JAX's random numbers. A
# wrong rule stops at its bias.

# %%
import jax.numpy as jnp

from jaxspec.core import Distribution, Draft, noise


def first_tokens(rule, count, seed):
    """The first word of `count` rounds of one draft token, with a rule of the library."""
    keys, position = noise.row_keys(jax.random.key(seed), count), jnp.zeros(count, jnp.int32)
    log_p = jnp.broadcast_to(jnp.log(p.astype(np.float32)), (count, 2, len(p)))
    log_q = jnp.broadcast_to(jnp.log(q.astype(np.float32)), (count, len(q)))
    drafted = noise.categorical(noise.at(keys, position, noise.Purpose.DRAFT), log_q)
    draft = Draft(drafted[:, None], jnp.ones(count, jnp.int32), log_probs=log_q[:, None])
    verdict = rule.verify(keys, position, draft, Distribution(log_p))
    return np.asarray(jnp.where(verdict.num_accepted > 0, drafted, verdict.next_token))


def l1_distance(words, counts):
    """The sum of |share - p| among the first n words, for each n of `counts`."""
    return np.array(
        [np.abs(np.bincount(words[:n], minlength=len(p)) / n - p).sum() for n in counts]
    )


def by_chance(counts):
    """Nearly the mean distance of n samples of p itself: the sum of sqrt(2 p (1 - p) / (π n))."""
    return np.sqrt(2 * p * (1 - p) / np.pi).sum() / np.sqrt(counts)


words["right: jaxspec.rules.rejection()"] = first_tokens(jaxspec.rules.rejection(), COUNT, seed=3)
counts = np.unique(np.geomspace(10, COUNT, 25).astype(int))
distances = {name: l1_distance(drawn, counts) for name, drawn in words.items()}

figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
axes.plot(
    counts, by_chance(counts), color="gray", linestyle=":", label="samples of p itself, on average"
)
for (name, distance), colour, marker in zip(
    distances.items(), (GREEN, RED, PURPLE, BLUE), "os^D", strict=True
):
    axes.plot(counts, distance, color=colour, marker=marker, markersize=4, linewidth=1, label=name)
axes.set(
    xscale="log", yscale="log", xlabel="rounds", ylabel="L1 distance to the target's distribution"
)
axes.legend(frameon=False)
display(picture(figure))

# %% [markdown] Where the wrong ones stop can be worked out. Without the residual, a word has
# probability min(p, q) + (1 − β) p. If the most probable word g is drafted, it is accepted with
# probability a = min(1, p(g) / q(g)), and else replaced by a draw from the residual distribution.

# %%
g = np.argmax(q)
a = min(1.0, p[g] / q[g])
wrong_distributions = {
    "wrong: no residual": accepted + (1 - beta) * p,
    "wrong: argmax scored with q": a * np.eye(len(p))[g] + (1 - a) * residual(p, q),
}
tolerance = 4 * by_chance(COUNT)
for name, distribution in wrong_distributions.items():
    bias = np.abs(distribution - p).sum()
    print(f"{name:30} worked out {bias:.3f}, sampled {distances[name][-1]:.3f}")
    assert abs(distances[name][-1] - bias) < tolerance < bias
for name in distances.keys() - wrong_distributions.keys():
    print(f"{name:34} sampled {distances[name][-1]:.4f}; by chance {by_chance(COUNT):.4f}")
    assert distances[name][-1] < tolerance

# %% [markdown] A draft token that was not drawn from q is still a draw: from the distribution that
# has all its mass at g. With that in the place of q the argument above holds. In jaxspec such a
# drafter gives no probabilities (`Draft.log_probs` is `None`).
#
# ## Every case
#
# A real decoder makes several draft tokens a round, keeps caches, draws a bonus token if all draft
# tokens were right. Samples cannot show that all of it is right: an error of one in a million hides
# in their noise. So jaxspec runs the decoder itself, on a model of three tokens, with every outcome
# of every random draw, and adds up the probability of each text. What is left of the difference is
# rounding: some 1e-7.

# %%
from jaxspec.testing import certify, table_model

target, draft = table_model(jax.random.key(1), vocab=3), table_model(jax.random.key(2), vocab=3)
rules = [jaxspec.rules.rejection(), jaxspec.rules.block(), jaxspec.rules.lenient(0.5)]
for rule in rules:
    off = certify(target, drafter=draft, rule=rule, gamma=2, steps=3)
    print(
        f"{rule.name:14} claims to be {'exact' if rule.exact else 'inexact'}; it is off by "
        f"{off:.1e}"
    )
    assert (off < 1e-6) == rule.exact

# %% [markdown] `lenient` is no mistake: it accepts more draft tokens than exactness allows, and is
# marked so. Now the two mistakes, in the library's own terms, and on the p and q from above. With
# one draft token a round the second token is the first that the rule decides. Its total variation
# from p is half of the L1 distance, and must be what was worked out above.

# %%
from jaxspec.core import Rule
from jaxspec.rules import common
from jaxspec.testing import table_model_from


def no_residual(keys, position, draft, target):
    """Accepts the draft tokens that it should; then draws from p, whatever was rejected."""
    verdict = jaxspec.rules.rejection().verify(keys, position, draft, target)
    after = common.take_position(target.log_probs, verdict.num_accepted)
    return verdict._replace(next_token=common.sample_residual(keys, position, after))


def pretending(model):
    """Drafts the most probable token, and claims to have drawn it from the model's distribution,
    here one row of logits.
    """
    honest = jaxspec.drafters.greedy(model)

    def propose(weights, caches, context):
        draft, caches = honest.functions.propose(weights, caches, context)
        claimed = jnp.broadcast_to(
            jax.nn.log_softmax(weights.draft), (*draft.tokens.shape, len(weights.draft))
        )
        return draft._replace(log_probs=claimed), caches

    return honest._replace(functions=honest.functions._replace(propose=propose))


target, draft = (table_model_from(jnp.log(distribution)) for distribution in (p, q))
name = "wrong: no residual"
off = certify(target, gamma=1, steps=2, drafter=draft, rule=Rule(no_residual, name, exact=False))
bias = np.abs(wrong_distributions[name] - p).sum()
print(f"{name:28} off by {off:.4f}, worked out {bias / 2:.4f}")
assert np.isclose(off, bias / 2, atol=1e-5)

try:  # a drafter that says the wrong thing of its draws is named
    certify(target, gamma=1, steps=2, drafter=pretending(draft))
except ValueError as error:
    print("wrong: argmax scored with q:", str(error).partition(". ")[0])
else:
    raise AssertionError("the certificate has not seen it")

off = certify(target, gamma=1, steps=2, drafter=jaxspec.drafters.greedy(draft))
print(f"{'argmax, as a point mass':28} off by {off:.0e}")
assert off < 1e-6
