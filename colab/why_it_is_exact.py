# %% [markdown]
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxspec/jaxspec/blob/main/colab/why_it_is_exact.ipynb)

# %%
# Installs jaxspec where it is missing (from the checkout that this lies in, or from git), and prints what it runs on.
import glob
import importlib.util
import os
import shutil
import subprocess
import sys

if importlib.util.find_spec("jaxspec") is None:
    tpu = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    extra = "cuda," if shutil.which("nvidia-smi") else "tpu," if tpu else ""
    package = f"jaxspec-decoding[{extra}figures] @ git+https://github.com/jaxspec/jaxspec"
    if os.path.isfile("../jaxspec/__init__.py"):  # the checkout that this notebook lies in
        package = f"..[{extra}figures]"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", package], check=True)

import jax

import jaxspec
from jaxspec.core import programs

programs.keep()  # on disk: what is compiled here, the next kernel need not compile
SMOKE = bool(os.environ.get("JAXSPEC_SMOKE"))  # shorter loops, for tests
device = jax.devices()[0]
print(f"jaxspec {jaxspec.__version__}, jax {jax.__version__}, {jax.device_count()} x {device.device_kind}")

# %% [markdown]
# # Why it is exact
#
# Speculative decoding draws tokens from one model, the draft, and ends up with the distribution of another, the target.
# Here is how, for one token and two distributions over a few words: first in a picture, then in samples, and at the end
# by counting every case.

# %%
# Pictures are drawn by scripts of the repository, which the installed package has not.
if importlib.util.find_spec("benchmarks") is None:
    checkout = ".." if os.path.isdir("../benchmarks") else "jaxspec-checkout"
    if not os.path.isdir(f"{checkout}/benchmarks"):
        repository = "https://github.com/jaxspec/jaxspec"
        subprocess.run(["git", "clone", "--quiet", "--depth", "1", repository, checkout], check=True)
    sys.path.append(os.path.abspath(checkout))

# %%
import io

import numpy as np
from IPython.display import Image, display

try:
    import ipywidgets as widgets
except ImportError:
    widgets = None

from benchmarks import divergence, figures
from benchmarks.figures import sampling
from benchmarks.figures.style import BLUE, GREEN, canvas

WORDS = ["the", "a", "cat", "dog", "sat"]
p = np.array([0.40, 0.25, 0.15, 0.15, 0.05])  # the target's probabilities of the next word
q = np.array([0.20, 0.45, 0.10, 0.05, 0.20])  # the draft's


def picture(figure):
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90)
    return Image(buffer.getvalue())


def explore(draw, **sliders):
    """Draws once for every position of the sliders; just once where there are none."""
    if widgets is None:
        print("The sliders need ipywidgets: pip install ipywidgets")
        display(draw(**{name: value for name, (value, *_) in sliders.items()}))
        return
    made = {}
    for name, (value, low, high, step) in sliders.items():
        kind = widgets.IntSlider if isinstance(step, int) else widgets.FloatSlider
        label = name.replace("_", " ")
        made[name] = kind(value, min=low, max=high, step=step, description=label, continuous_update=False)
    half = -(-len(made) // 2)
    columns = [widgets.VBox(list(made.values())[:half]), widgets.VBox(list(made.values())[half:])]
    display(widgets.HBox(columns), widgets.interactive_output(lambda **values: display(draw(**values)), made))


# %% [markdown]
# ## The picture
#
# The draft draws a draft token x from q. It is accepted with probability min(1, p(x) / q(x)). So x is drafted *and*
# accepted with probability q(x) · min(1, p(x) / q(x)) = min(p(x), q(x)): the green part. It never exceeds p(x), and
# what it lacks is the blue part, p(x) − min(p(x), q(x)).
#
# How often is a draft token rejected? As often as the red hatched parts together: where q is too large, q(x) − p(x).
# The blue parts have the same sum, since p and q both sum to 1. So if every rejected draft token is replaced by a draw
# from the blue part, scaled to sum to 1 (the *residual* distribution), blue fills up with exactly its own mass. Green
# and blue together are p.
#
# The sliders set the weights of each word; they are scaled to sum to 1.


# %%
def distributions(**weights):
    """The two distributions that the sliders set."""
    found = [np.array([weights[f"{side}_{word}"] for word in WORDS]) for side in "pq"]
    return [distribution / distribution.sum() for distribution in found]


def draw(**weights):
    figure = figures.decomposition(*distributions(**weights), WORDS)
    figure.axes[0].set_ylim(0, 1)
    return picture(figure)


sides = {f"p_{word}": (x, 0.01, 1.0, 0.01) for word, x in zip(WORDS, p, strict=True)}
sides |= {f"q_{word}": (x, 0.01, 1.0, 0.01) for word, x in zip(WORDS, q, strict=True)}
explore(draw, **sides)

# %% [markdown]
# The same in numbers. Whatever p and q are, accepted and replaced mass add up to p:

# %%
accepted = np.minimum(p, q)
beta = accepted.sum()  # the probability that a draft token is accepted
replaced = (1 - beta) * divergence.residual(p, q)

print(f"{'word':6}{'p':>8}{'q':>8}{'accepted':>10}{'replaced':>10}{'sum':>8}")
for row in zip(WORDS, p, q, accepted, replaced, accepted + replaced, strict=True):
    print("{:6}{:8.2f}{:8.2f}{:10.2f}{:10.2f}{:8.2f}".format(*row))
print(f"a draft token is accepted with probability {beta:.2f}")

random = np.random.default_rng(0)
for _ in range(1000):
    some_p, some_q = random.dirichlet(np.ones(5), size=2)
    overlap = np.minimum(some_p, some_q)
    assert np.allclose(overlap + (1 - overlap.sum()) * divergence.residual(some_p, some_q), some_p)

# %% [markdown]
# ## Many rounds
#
# This is the algorithm for one draft token, in NumPy. It has two switches, each a mistake that has been made in real
# programs: drawing from p again after a rejection, and drafting the most probable word while pretending that it was
# drawn from q. The text looks fine either way.


# %%
def rounds(count, seed, again_from_p=False, likeliest=False):
    """The words of `count` independent rounds."""
    random = np.random.default_rng(seed)
    drafted = np.full(count, np.argmax(q)) if likeliest else random.choice(len(q), size=count, p=q)
    accepted = random.random(count) * q[drafted] < p[drafted]
    instead = p if again_from_p else divergence.residual(p, q)  # max(0, p - q), scaled to sum to 1
    return np.where(accepted, drafted, random.choice(len(p), size=count, p=instead))


COUNT = 10_000 if SMOKE else 1_000_000
words = {
    "right": rounds(COUNT, seed=0),
    "wrong: no residual": rounds(COUNT, seed=1, again_from_p=True),
    "wrong: argmax scored with q": rounds(COUNT, seed=2, likeliest=True),
}

# %% [markdown]
# Take 10, 100, 1,000 and more of the rounds, and see the shares of the words settle: the right rule's on p (black
# lines), the wrong one's beside it.


# %%
def shares(power_of_10):
    count = 10**power_of_10
    figure, axes = canvas(7.0, 3.5)
    names = list(words)[:2]
    for name, shift, colour in zip(names, (-0.2, 0.2), (GREEN, BLUE), strict=True):
        share = np.bincount(words[name][:count], minlength=len(p)) / count
        axes.bar(np.arange(len(p)) + shift, share, 0.38, color=colour, label=name)
    axes.hlines(p, np.arange(len(p)) - 0.4, np.arange(len(p)) + 0.4, color="black", linewidth=2, label="p")
    axes.set_xticks(range(len(p)), WORDS)
    axes.set(ylabel="share of the words", ylim=(0, 1), title=f"{count:,} rounds")
    axes.legend(frameon=False)
    return picture(figure)


explore(shares, power_of_10=(3, 1, int(np.log10(COUNT)), 1))

# %% [markdown]
# The L1 distance is the sum over words of |share − p|. Random samples of p itself come closer as one over the square
# root of their number: the dotted line. The right rule follows it. So does `rejection`, the rule of the library, which
# does the same with JAX's random numbers. A wrong rule stops at its bias.

# %%
words["right: jaxspec.rules.rejection()"] = sampling.first_tokens(jaxspec.rules.rejection(), p, q, COUNT, seed=3)
counts = np.unique(np.geomspace(10, COUNT, 25).astype(int))
distances = {name: sampling.l1_distance(some, p, counts) for name, some in words.items()}
display(picture(figures.distribution_distance(counts, distances, sampling.noise_distance(p, counts))))

# %% [markdown]
# Where the wrong ones stop can be worked out. Without the residual, a word has probability min(p, q) + (1 − β) p. If
# the most probable word g is drafted, it is accepted with probability a = min(1, p(g) / q(g)), and else replaced by a
# draw from the residual distribution.

# %%
g = np.argmax(q)
a = min(1.0, p[g] / q[g])
wrong_distributions = {
    "wrong: no residual": accepted + (1 - beta) * p,
    "wrong: argmax scored with q": a * np.eye(len(p))[g] + (1 - a) * divergence.residual(p, q),
}
noise = 4 * sampling.noise_distance(p, COUNT)
for name, distribution in wrong_distributions.items():
    bias = np.abs(distribution - p).sum()
    print(f"{name:30} worked out {bias:.3f}, sampled {distances[name][-1]:.3f}")
    assert abs(distances[name][-1] - bias) < noise < bias
for name in distances.keys() - wrong_distributions.keys():
    print(f"{name:34} sampled {distances[name][-1]:.4f}; by chance {sampling.noise_distance(p, COUNT):.4f}")
    assert distances[name][-1] < noise

# %% [markdown]
# A draft token that was not drawn from q is still a draw: from the distribution that has all its mass at g. With that
# in the place of q the argument above holds. In jaxspec such a drafter gives no probabilities (`Draft.log_probs` is
# `None`).
#
# ## Every case
#
# A real decoder makes several draft tokens a round, keeps caches, draws a bonus token if all draft tokens were right.
# Samples cannot show that all of it is right: an error of one in a million hides in their noise. So jaxspec runs the
# decoder itself, on a model of three tokens, with every outcome of every random draw, and adds up the probability of
# each text. What is left of the difference is rounding: some 1e-7.

# %%
from jaxspec.testing import certify, table_model

target, draft = table_model(jax.random.key(1), vocab=3), table_model(jax.random.key(2), vocab=3)
rules = [jaxspec.rules.rejection(), jaxspec.rules.block(), jaxspec.rules.lenient(0.5)]
for rule in rules:
    off = certify(target, drafter=draft, rule=rule, gamma=2, steps=3)
    print(f"{rule.name:14} claims to be {'exact' if rule.exact else 'inexact'}; it is off by {off:.1e}")
    assert (off < 1e-6) == rule.exact

# %% [markdown]
# `lenient` is no mistake: it accepts more draft tokens than exactness allows, and is marked so. Now the two mistakes,
# in the library's own terms, and on the p and q from above. With one draft token a round the second token is the first
# that the rule decides. Its total variation from p is half of the L1 distance, and must be what was worked out above.

# %%
import jax.numpy as jnp

from jaxspec.core import Rule
from jaxspec.rules import common
from jaxspec.testing import table_model_from


def no_residual(keys, position, draft, target):
    """Accepts the draft tokens that it should; then draws from p, whatever was rejected."""
    verdict = jaxspec.rules.rejection().verify(keys, position, draft, target)
    after = common.take_position(target.log_probs, verdict.num_accepted)
    return verdict._replace(next_token=common.sample_residual(keys, position, after))


def pretending(model):
    """Drafts the most probable token, and claims to have drawn it from the model's distribution, here one row of
    logits."""
    honest = jaxspec.drafters.greedy(model)

    def propose(weights, caches, context):
        draft, caches = honest.functions.propose(weights, caches, context)
        claimed = jnp.broadcast_to(jax.nn.log_softmax(weights.draft), (*draft.tokens.shape, len(weights.draft)))
        return draft._replace(log_probs=claimed), caches

    return honest._replace(functions=honest.functions._replace(propose=propose))


target, draft = (table_model_from(jnp.log(distribution)) for distribution in (p, q))
wrong = {
    "wrong: no residual": dict(drafter=draft, rule=Rule(no_residual, "no residual", exact=False)),
    "wrong: argmax scored with q": dict(drafter=pretending(draft)),
}
for name, choice in wrong.items():
    off, bias = certify(target, gamma=1, steps=2, **choice), np.abs(wrong_distributions[name] - p).sum()
    print(f"{name:28} off by {off:.4f}, worked out {bias / 2:.4f}")
    assert np.isclose(off, bias / 2, atol=1e-5)

off = certify(target, gamma=1, steps=2, drafter=jaxspec.drafters.greedy(draft))
print(f"{'argmax, as a point mass':28} off by {off:.0e}")
assert off < 1e-6
