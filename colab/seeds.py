# %% [markdown]
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxspec/jaxspec/blob/main/colab/seeds.ipynb)
# [![Open In Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/jaxspec/jaxspec/blob/main/colab/seeds.ipynb)

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
# # The papers, recomputed
#
# jaxspec implements five documents: the paper of Leviathan, Kalman and Matias (arXiv 2211.17192), a
# survey in Chinese, notes on a PyTorch implementation (`speculative_generate`), lecture notes by
# Karl Stratos, and a lesson with widgets. Here are their formulas and printed numbers, computed
# again, and the statements that do not hold. All of it is arithmetic, but for the last cells, which
# run a small pair of models.

# %%
import jax.numpy as jnp
import numpy as np
from IPython.display import HTML

from jaxspec import trace
from jaxspec.analysis import divergence, formulas, widgets
from jaxspec.sampling import apply_temperature, keep_top_p

# %% [markdown]
# ## One token
#
# p is the target's distribution and q the draft's. A draft token is accepted with probability β = Σ
# min(p, q) (Theorem 3.5), which is 1 − D_LK (Lemma 3.3). After a rejection the token is drawn from
# norm(max(0, p − q)). Classical rejection sampling accepts less, min q / p (appendix A.2), and
# lenience more (A.5).

# %%
p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.6, 0.2])
beta, residual = divergence.beta(p, q), divergence.residual(p, q)
print(f"β = {beta:.2f}, D_LK = {divergence.d_lk(p, q):.2f}, residual {residual}")
print(
    f"classical rejection {divergence.classical_rejection(p, q):.2f}, lenience 0.5 "
    f"{divergence.beta(p, q, 0.5):.2f}"
)
assert np.isclose(beta, 1 - divergence.d_lk(p, q))
assert np.allclose(np.minimum(p, q) + (1 - beta) * residual, p)

# %% [markdown]
# ## The paper's tables
#
# Table 1 has operations (Theorem 3.11) and speed (Theorem 3.8) of a drafter without cost. All
# twelve numbers come out.

# %%
TABLE_1 = [  # α, γ, operations, speed
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]
print("  α   γ  operations  printed   speed  printed")
for alpha, gamma, printed_work, printed_speed in TABLE_1:
    work, speed = formulas.operations(alpha, gamma, 0.0), formulas.improvement(alpha, gamma, 0.0)
    print(f"{alpha:3} {gamma:3} {work:11.3f} {printed_work:8.2f} {speed:7.3f} {printed_speed:8.2f}")
    assert abs(work - printed_work) < 0.006 and abs(speed - printed_speed) < 0.006

# %% [markdown] Table 4 has the speed that Theorem 3.8 promises for T5-XXL with three drafters
# (EXP). Nine of twelve come out to the digit. α and c are printed with two digits. The last column
# is what any α and c that round to these can give, and each printed number is one of these,
# rounded.

# %%
TABLE_4 = [  # task, drafter, temperature, γ, α, c, EXP
    ("EnDe", "small", 0, 7, 0.75, 0.02, 3.2),
    ("EnDe", "base", 0, 7, 0.80, 0.04, 3.3),
    ("EnDe", "large", 0, 7, 0.82, 0.11, 2.5),
    ("EnDe", "small", 1, 7, 0.62, 0.02, 2.3),
    ("EnDe", "base", 1, 5, 0.68, 0.04, 2.4),
    ("EnDe", "large", 1, 3, 0.71, 0.11, 2.0),
    ("CNN/DM", "small", 0, 5, 0.65, 0.02, 2.4),
    ("CNN/DM", "base", 0, 5, 0.73, 0.04, 2.6),
    ("CNN/DM", "large", 0, 3, 0.74, 0.11, 2.0),
    ("CNN/DM", "small", 1, 5, 0.53, 0.02, 1.9),
    ("CNN/DM", "base", 1, 3, 0.55, 0.04, 1.8),
    ("CNN/DM", "large", 1, 3, 0.56, 0.11, 1.6),
]
print("task    drafter  T  γ     α     c  printed   here  by rounding")
same = 0
for task, drafter, temperature, gamma, alpha, c, printed in TABLE_4:
    speed = float(formulas.improvement(alpha, gamma, c))
    low = float(formulas.improvement(alpha - 0.005, gamma, c + 0.005))
    high = float(formulas.improvement(alpha + 0.005, gamma, c - 0.005))
    same += round(speed, 1) == printed
    setting = f"{task:8}{drafter:7}{temperature:3}{gamma:3}{alpha:6}{c:6}"
    print(f"{setting}{printed:9}{speed:7.2f}  {low:.2f} to {high:.2f}")
    assert low - 0.05 < printed < high + 0.05
print(f"{same} of {len(TABLE_4)} come out to the digit")
assert same == 9

# %% [markdown] Numbers in the text. A bigram table with α = 0.2 and γ = 3 costs nothing: 1.25 times
# (section 3.6). An oracle for γ gains up to 60% over the best fixed γ (section 3.5). The lecture
# notes promise more than 4 tokens a round for β = 0.8, T = 10.

# %%
bigram = formulas.improvement(0.2, 3, 0.0)
fixed = formulas.improvement(0.9, formulas.optimal_gamma(0.9, 0.1), 0.1)
gain = formulas.oracle_improvement(0.9, 0.1) / fixed - 1
stratos = formulas.expected_tokens(0.8, 10)
print(
    f"bigram {bigram:.2f} times; oracle at α = 0.9, c = 0.1: {gain:+.0%}; β = 0.8, T = 10: "
    f"{stratos:.2f} tokens"
)
assert round(float(bigram), 2) == 1.25 and 0.5 < gain < 0.6 and stratos > 4

# %% [markdown]
# ## Wrong: the lesson's sum begins at α⁰
#
# It adds α⁰ + … + α^(K−1) accepted tokens, and one more. A draft token is not accepted with
# certainty, so the first term is α¹. For α = 0.7, K = 5, c = 0.2 the lesson prints 3.77 tokens and
# 1.89 times.

# %%
alpha, k, c = 0.7, 5, 0.2
lesson = (1 - alpha**k) / (1 - alpha) + 1
right = widgets.Readouts.of(alpha, k, c)
print(f"the lesson: {lesson:.2f} tokens, {lesson / (1 + k * c):.2f} times")
print(f"right:      {right.tokens:.2f} tokens, {right.speed_up:.2f} times")
assert np.isclose(lesson - right.tokens, 1 - alpha**k)

# %% [markdown] The lesson's landscape with the right formula: the speed-up for each α and γ. The
# sliders move the white dot, whose numbers stand above. The other dots are two drafters of T5-XXL
# in Table 4 (EnDe). Each has its own c, 0.02 and 0.11: set it, and the map is that drafter's.
# `check` is what each further token adds to the verify pass, 0 in the paper.

# %%
drafters = [widgets.Dot("T5-small, T = 0", 0.75, 7), widgets.Dot("T5-large, T = 1", 0.71, 3)]
widgets.explore_landscape(alpha=0.7, gamma=5, c=0.2, marks=drafters)

# %% [markdown]
# ## Wrong: the lecture notes return the rejected token
#
# Step 7 of speculative decoding returns x₁ … x_n, where n is the first rejected position, and then
# a token from the residual distribution. As printed, x₁ comes out whether it was accepted or not,
# so the first token has the distribution q. The accepted tokens are x₁ … x_(n−1).

# %%
as_printed = np.minimum(p, q) + np.maximum(q - p, 0)  # accepted, and rejected but returned
as_meant = np.minimum(p, q) + (1 - beta) * residual
print(f"p {p}, q {q}\nas printed {as_printed}\nas meant   {as_meant}")
assert np.allclose(as_printed, q) and np.allclose(as_meant, p)

# %% [markdown]
# ## Wrong: two places in the paper's appendix A.5
#
# At temperature 0 it accepts x "in case p(x) ≤ l · max(p)". With l = 1 that accepts every token; ≥
# is meant.
#
# For α = 0.62, 0.71, 0.76, 0.84 (Table 5) and c = 0.015 it prints 2.5, 3.1, 3.6 and 5 times. No γ
# reaches these.

# %%
print(f"l = 1 accepts with ≤ {p <= p.max()}, with ≥ {p >= p.max()}")
alpha, printed = np.array([0.62, 0.71, 0.76, 0.84]), [2.5, 3.1, 3.6, 5.0]
gamma = formulas.optimal_gamma(alpha, 0.015)
speed = formulas.improvement(alpha, gamma, 0.015)
print(f"printed {printed}; at the best γ {gamma}: {speed.round(2)}")
assert np.all(p <= p.max()) and np.all(speed < printed)

# %% [markdown]
# ## Different: the notes filter, then divide by the temperature
#
# Top-k and top-p then see the distribution at temperature 1. jaxspec divides first, as transformers
# does. At T = 2 and top-p 0.6 the two keep different tokens.

# %%
# [row, position, vocabulary], largest first
logits = jnp.log(jnp.array([[[0.44, 0.22, 0.1, 0.08, 0.08, 0.08]]]))
temperature, top_p = jnp.array([2.0]), jnp.array([0.6])
warm = apply_temperature(logits, temperature)
ours = jax.nn.softmax(keep_top_p(warm, warm, top_p))[0, 0]
notes = jax.nn.softmax(apply_temperature(keep_top_p(logits, logits, top_p), temperature))[0, 0]
print(f"jaxspec   {np.asarray(ours).round(3)}\nthe notes {np.asarray(notes).round(3)}")
assert np.allclose(ours[:3], [0.458, 0.324, 0.218], atol=1e-3) and np.allclose(
    notes[:2], [0.586, 0.414], atol=1e-3
)

# %% [markdown]
# ## Wrong: the notes' greedy mode
#
# It drafts the argmax of q and accepts it with probability p / q of the softmax. The target's
# greedy text would have the argmax of p. Here the draft's argmax is another token, and is accepted
# half of the time.

# %%
drafted = int(np.argmax(q))
accepted = min(1.0, p[drafted] / q[drafted])
print(
    f"argmax of p is {np.argmax(p)}; the notes return token {drafted} with probability "
    f"{accepted:.2f}"
)
assert drafted != np.argmax(p) and np.isclose(accepted, 0.5)

# %% [markdown]
# ## The notes' two switches
#
# `speculative_generate` has `first_target` and `skip_sample_adjustment`. jaxspec has neither. It
# refuses both names, and says why.
#
# **`first_target=True`** lets the target write the first token, before anything is drafted. So does
# jaxspec, since the pass that reads the prompt gives that token for nothing. With `False` the first
# token is drafted and judged like the others. Its distribution is p in both cases.
#
# **`skip_sample_adjustment=True`** draws from p after a rejection, and not from norm(max(0, p − q))
# (`max_fn` in the notes). It is for debugging: the text is then wrong. Here 15% of the probability
# lies at other tokens.

# %%
first_target = p
drafted_first = np.minimum(p, q) + (1 - beta) * residual
skipped = np.minimum(p, q) + (1 - beta) * p
print(f"first_target: True {first_target}, False {drafted_first}")
print(f"skip_sample_adjustment: {skipped}, off by {divergence.d_lk(skipped, p):.2f}")
assert np.allclose(drafted_first, first_target) and np.isclose(
    0.5 * np.abs(skipped - p).sum(), 0.15
)

# %% [markdown]
# ## The notes' `debug=True`: a trace with numbers
#
# The notes print q of each draft token, r, p / q and the adjusted sample. `trace_numbers=True`
# keeps these numbers, of a GPT that describes Debian packages and its small drafter. One line is a
# round. Under it stands each draft token: it is accepted where r is below min(1, p / q). Z is the
# mass of max(0, p − q), from which the next token is drawn after the rejection.

# %%
target, draft = jaxspec.load("debian-gpt-base"), jaxspec.load("debian-gpt-small")
sampling = dict(temperature=0.7, key=jax.random.key(7), gamma=3, max_new_tokens=12)
out = jaxspec.generate(
    target, "This package contains the", drafter=draft, trace_numbers=True, **sampling
)
rounds = trace.of_row(out.tokens[0, : out.lengths[0]], out.trace, 0)
HTML(trace.html(rounds, target.tokenizer))

# %% [markdown]
# The same numbers as columns, for `pandas.DataFrame` or as they are:

# %%
columns = out.trace.table()
tested = columns["tested"]
passes = columns["r"] < np.minimum(1.0, columns["ratio"])
print(
    f"{tested.sum()} of {len(tested)} draft tokens were tested, {columns['accepted'].sum()} accepted"
)
assert np.array_equal(passes[tested], columns["accepted"][tested])
assert np.allclose(columns["ratio"], columns["p"] / columns["q"])
