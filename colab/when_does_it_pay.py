# %% [markdown]
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxspec/jaxspec/blob/main/colab/when_does_it_pay.ipynb)
# [![Open In Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/jaxspec/jaxspec/blob/main/colab/when_does_it_pay.ipynb)

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
# # When does it pay?
#
# Three numbers determine how much faster speculative decoding is:
#
# * **α**, the acceptance rate: how probable it is that a draft token is accepted;
# * **c**, the cost of a draft token: the time of one pass of the draft, in passes of the target
# over one token;
# * **v**, the cost of the check: the time of the target's pass over γ + 1 tokens, in the same unit.
#
# A round yields (1 − α^(γ+1)) / (1 − α) tokens on average and takes γc + v. The paper sets v = 1:
# the check then costs what one token costs, which holds where hardware waits for weights to be read
# and has arithmetic to spare.

# %%
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import display

from jaxspec.analysis import acceptance, cost, formulas
from jaxspec.analysis.widgets import explore_landscape, landscape, picture
from jaxspec.decode.request import prepare

# %% [markdown]
# ## The map
#
# Speed-up for each α and γ, at one c and one price of checking: `check` is what each further token
# adds to the verify pass, v = 1 + check · γ, and 0 in the paper. The thick white line is a speed-up
# of 1: left of it speculation loses. The black line is the best γ for each α. Move the sliders: α
# and γ move the white dot, whose tokens a round, cost and speed-up stand above. The dearer a draft
# token or its check, the higher an α it takes to win, and the fewer draft tokens are best.

# %%
explore_landscape(alpha=0.8, gamma=5, c=0.05)

# %% [markdown]
# ## The best γ
#
# It grows with α and falls with c. At α = 0.8 and c = 0.05 it is 8, and text comes 3.1 times as
# fast. It need not be hit: half of these draft tokens bring 2.8, twice as many 2.7.

# %%
figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
rates = np.linspace(0, 0.995, 400)
for c, colour in zip(
    (0.01, 0.02, 0.05, 0.1), ("#440154", "#31688e", "#35b779", "#c8a000"), strict=True
):
    axes.plot(
        rates,
        formulas.optimal_gamma(rates, c),
        color=colour,
        drawstyle="steps-post",
        label=f"c = {c:g}",
    )
axes.set(xlabel="acceptance rate α", ylabel="best γ", xlim=(0, 1), ylim=(0, 30))
axes.legend(loc="upper left")
display(picture(figure))

best = int(formulas.optimal_gamma(0.8, 0.05))
speed = formulas.improvement(0.8, [best // 2, best, 2 * best], 0.05)
print(
    f"α = 0.8, c = 0.05: the best γ is {best}; at γ = {best // 2}, {best}, {2 * best} the speed-up "
    f"is {speed.round(2)}"
)

tried = formulas.improvement(0.8, np.arange(65), 0.05)
assert np.argmax(tried) == best == 8
assert speed.round(1).tolist() == [2.8, 3.1, 2.7]

# %% [markdown]
# ## Where it loses
#
# There are three ways to lose: draft tokens are seldom right; the draft takes too long; the check
# takes too long, because the hardware has no spare compute (large batches, or small machines).
# `formulas.obstacles` names each one that, mended alone, would make some γ pay: a slow draft, for
# example, could also be made up for by draft tokens that are always right. `break_even` is the α
# from which on some γ pays.

# %%
cases = {
    "all is well": (0.8, 0.05, 0.02),
    "draft tokens are seldom right": (0.05, 0.08, 0.0),
    "the draft is slow": (0.6, 0.7, 0.0),
    "the check is slow": (0.6, 0.02, 0.9),
}
print(
    f"{'':26}{'alpha':>6}{'c':>6}{'check':>7}{'best γ':>8}{'speed-up':>10}{'break-even':>12}   "
    "obstacles"
)
for name, (alpha, c, check) in cases.items():
    v = 1 + check * np.arange(33)
    gamma = int(formulas.optimal_gamma(alpha, c, v))
    speed = float(formulas.improvement(alpha, gamma, c, v[gamma]))
    why = ", ".join(formulas.obstacles(alpha, c, v))
    print(
        f"{name:26}{alpha:6}{c:6}{check:7}{gamma:8}{speed:10.2f}{formulas.break_even(c, v):12.2f}  "
        f" {why}"
    )
    assert (gamma > 0) == (name == "all is well") == (not why)

# %% [markdown]
# ## This pair, on this machine
#
# α belongs to two models, a task and a temperature. It is measured along text that the target
# writes: at each position, how much of p and q is common. (The share of draft tokens that a run of
# speculative decoding accepts is something else: after the first rejected draft token none gets a
# trial.) What is measured is a `Prepared`, which `prepare` makes of the arguments of `generate`.

# %%
from jaxspec.files import corpus

target, draft = jaxspec.load("debian-t5-large"), jaxspec.load("debian-t5-draft")
prompts = [row["input"] for row in corpus.heldout("translation")]
prompts = sorted(prompts[:64], key=len)[:16]  # short ones, which are quick

TOKENS = 32
GAMMA = 4
settings = dict(drafter=draft, gamma=GAMMA, max_new_tokens=TOKENS)
measured = acceptance.measure(prepare(target, prompts, **settings))
alpha = measured.alpha
print(
    f"α = {alpha:.2f} ± {measured.stderr:.2f} at temperature 0, over {measured.positions} positions"
)
assert 0.3 < alpha < 0.95

# %% [markdown] c and v belong to two models, a machine and a batch size. They are timed on the
# device, in loops without Python between the passes. v is measured at γ = 4, and taken to be
# linear.

# %%
loops = dict(repeats=3 if SMOKE else 7, inner=5 if SMOKE else 30)
costs = {
    batch: cost.measure(prepare(target, prompts[:batch], **settings), **loops) for batch in (1, 16)
}

print("batch   target's pass     c     v   best γ   speed-up there   obstacles")
plans = {}
for batch, measured_costs in costs.items():
    c, check = measured_costs.c, max(measured_costs.v - 1, 0.0) / GAMMA
    v = 1 + check * np.arange(17)
    gamma = int(formulas.optimal_gamma(alpha, c, v))
    plans[batch] = gamma, check
    speed = float(formulas.improvement(alpha, gamma, c, v[gamma]))
    why = ", ".join(formulas.obstacles(alpha, c, v))
    times = f"{measured_costs.target_ms:13.2f} ms{c:6.2f}{measured_costs.v:6.2f}"
    print(f"{batch:5}{times}{gamma:9}{speed:17.2f}   {why}")
    assert 0 < c < 1 and (gamma > 0) == (not why)

# %% [markdown]
# The same on the map. The dot is the pair at its best γ (at γ = 1, should none pay).

# %%
for batch, measured_costs in costs.items():
    gamma, check = plans[batch]
    title = f"batch {batch}: c = {measured_costs.c:.2f}, v({GAMMA}) = {measured_costs.v:.2f}"
    mark = f"this pair, batch {batch}", min(alpha, 1.0), max(gamma, 1)
    display(landscape(measured_costs.c, check, [mark], title=title))

# %% [markdown]
# With sliders, from this pair at batch 1: what would a better or a cheaper drafter bring?

# %%
gamma, check = plans[1]
explore_landscape(
    alpha=round(min(alpha, 1.0), 2),
    gamma=max(gamma, 1),
    c=round(costs[1].c, 2),
    check=round(check, 2),
    marks=[("this pair", min(alpha, 1.0), max(gamma, 1))],
)

# %% [markdown]
# ## Prediction and measurement
#
# Whole generations with and without the drafter, interleaved, medians. The prediction leaves out
# what both share (reading the prompt, the call itself) and takes draft tokens to be right
# independently of each other, so a difference is expected.
#
# These models are far smaller than those that speculative decoding is made for: on a CPU their
# weights stay in its cache, there is no waiting for memory that would hide the check, and v is well
# above 1. A target of some billion parameters on an accelerator, at batch 1, has v near 1.

# %%
prompt = prompts[-1]
variants = [
    lambda d=d: jaxspec.generate(target, prompt, **(settings | {"drafter": d}))
    for d in (draft, None)
]
fast, plain = [variant() for variant in variants]
seconds = np.median(cost.interleave(variants, repeats=3 if SMOKE else 15), axis=1)

predicted = float(formulas.improvement(alpha, GAMMA, costs[1].c, costs[1].v))
print(
    f"tokens per round {fast.stats.tokens_per_round[0]:.2f}, expected "
    f"{formulas.expected_tokens(alpha, GAMMA):.2f}"
)
print(f"speed-up {seconds[1] / seconds[0]:.2f}, predicted {predicted:.2f}")
assert fast.stats.rounds[0] <= plain.stats.rounds[0]
assert 1 <= fast.stats.tokens_per_round[0] <= GAMMA + 1

# %% [markdown] `jaxspec plan` does this for any pair on the command line, with v measured at every
# γ, and `jaxspec bench` tries a whole range of γ. Policies (`quickstart.ipynb`) choose γ while
# the text is written, from what they see.
