# %% [markdown]
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxspec/jaxspec/blob/main/colab/when_does_it_pay.ipynb)

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
# # When does it pay?
#
# Three numbers determine how much faster speculative decoding is:
#
# * **α**, the acceptance rate: how probable it is that a draft token is accepted;
# * **c**, the cost of a draft token: the time of one pass of the draft, in passes of the target over one token;
# * **v**, the cost of the check: the time of the target's pass over γ + 1 tokens, in the same unit.
#
# A round yields (1 − α^(γ+1)) / (1 − α) tokens on average and takes γc + v. The paper sets v = 1: the check then costs
# what one token costs, which holds where hardware waits for weights to be read and has arithmetic to spare.

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

from benchmarks import figures
from benchmarks.figures.theory import Mark
from jaxspec.analysis import acceptance, cost, formulas
from jaxspec.decode.request import prepare


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
    made = {
        name: widgets.FloatSlider(value, min=low, max=high, step=step, description=name, continuous_update=False)
        for name, (value, low, high, step) in sliders.items()
    }
    display(*made.values(), widgets.interactive_output(lambda **values: display(draw(**values)), made))


# %% [markdown]
# ## The map
#
# Speed-up for each α and γ, at one c and one price of checking: `check` is what each further token adds to the verify
# pass, v = 1 + check · γ, and 0 in the paper. The thick white line is a speed-up of 1: left of it speculation loses.
# The black line is the best γ for each α. Move the sliders: the dearer a draft token or its check, the higher an α it
# takes to win, and the fewer draft tokens are best.


# %%
def landscape(c, check, marks=()):
    return picture(figures.landscape(c, lambda gamma: 1 + check * gamma, marks, title=f"c = {c:g}, check = {check:g}"))


explore(landscape, c=(0.05, 0.0, 0.5, 0.01), check=(0.0, 0.0, 1.0, 0.02))

# %% [markdown]
# ## The best γ
#
# It grows with α and falls with c. At α = 0.8 and c = 0.05 it is 8, and text comes 3.1 times as fast. It need not be
# hit: half of these draft tokens bring 2.8, twice as many 2.7.

# %%
display(picture(figures.optimal_gamma()))
best = int(formulas.optimal_gamma(0.8, 0.05))
speed = formulas.improvement(0.8, [best // 2, best, 2 * best], 0.05)
print(
    f"α = 0.8, c = 0.05: the best γ is {best}; at γ = {best // 2}, {best}, {2 * best} the speed-up is {speed.round(2)}"
)

tried = formulas.improvement(0.8, np.arange(65), 0.05)
assert np.argmax(tried) == best == 8
assert speed.round(1).tolist() == [2.8, 3.1, 2.7]

# %% [markdown]
# ## Where it loses
#
# There are three ways to lose: draft tokens are seldom right; the draft takes too long; the check takes too long,
# because the hardware has no spare compute (large batches, or small machines). `formulas.obstacles` names each
# one that, mended alone, would make some γ pay: a slow draft, for example, could also be made up for by draft tokens
# that are always right. `break_even` is the α from which on some γ pays.

# %%
cases = {
    "all is well": (0.8, 0.05, 0.02),
    "draft tokens are seldom right": (0.05, 0.08, 0.0),
    "the draft is slow": (0.6, 0.7, 0.0),
    "the check is slow": (0.6, 0.02, 0.9),
}
print(f"{'':26}{'alpha':>6}{'c':>6}{'check':>7}{'best γ':>8}{'speed-up':>10}{'break-even':>12}   obstacles")
for name, (alpha, c, check) in cases.items():
    v = 1 + check * np.arange(33)
    gamma = int(formulas.optimal_gamma(alpha, c, v))
    speed = float(formulas.improvement(alpha, gamma, c, v[gamma]))
    why = ", ".join(formulas.obstacles(alpha, c, v))
    print(f"{name:26}{alpha:6}{c:6}{check:7}{gamma:8}{speed:10.2f}{formulas.break_even(c, v):12.2f}   {why}")
    assert (gamma > 0) == (name == "all is well") == (not why)

# %% [markdown]
# ## This pair, on this machine
#
# α belongs to two models, a task and a temperature. It is measured along text that the target writes: at each position,
# how much of p and q is common. (The share of draft tokens that a run of speculative decoding accepts is something else:
# after the first rejected draft token none gets a trial.) What is measured is a `Prepared`, which `prepare` makes of the
# arguments of `generate`.

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
print(f"α = {alpha:.2f} ± {measured.stderr:.2f} at temperature 0, over {measured.positions} positions")
assert 0.3 < alpha < 0.95

# %% [markdown]
# c and v belong to two models, a machine and a batch size. They are timed on the device, in loops without Python
# between the passes. v is measured at γ = 4, and taken to be linear.

# %%
loops = dict(repeats=3 if SMOKE else 7, inner=5 if SMOKE else 30)
costs = {batch: cost.measure(prepare(target, prompts[:batch], **settings), **loops) for batch in (1, 16)}

print("batch   target's pass     c     v   best γ   speed-up there   obstacles")
plans = {}
for batch, found in costs.items():
    check = max(found.v - 1, 0.0) / GAMMA
    v = 1 + check * np.arange(17)
    gamma = int(formulas.optimal_gamma(alpha, found.c, v))
    plans[batch] = gamma, check
    speed = float(formulas.improvement(alpha, gamma, found.c, v[gamma]))
    why = ", ".join(formulas.obstacles(alpha, found.c, v))
    print(f"{batch:5}{found.target_ms:13.2f} ms{found.c:6.2f}{found.v:6.2f}{gamma:9}{speed:17.2f}   {why}")
    assert 0 < found.c < 1 and (gamma > 0) == (not why)

# %% [markdown]
# The same on the map. The dot is the pair at its best γ (at γ = 1, should none pay).

# %%
for batch, found in costs.items():
    gamma, check = plans[batch]
    mark = Mark(f"this pair, batch {batch}", alpha, max(gamma, 1))
    title = f"batch {batch}: c = {found.c:.2f}, v({GAMMA}) = {found.v:.2f}"
    display(picture(figures.landscape(found.c, lambda gamma, check=check: 1 + check * gamma, [mark], title=title)))

# %% [markdown]
# ## Prediction and measurement
#
# Whole generations with and without the drafter, interleaved, medians. The prediction leaves out what both share
# (reading the prompt, the call itself) and takes draft tokens to be right independently of each other, so a difference
# is expected.
#
# These models are far smaller than those that speculative decoding is made for: on a CPU their weights stay in its
# cache, there is no waiting for memory that would hide the check, and v is well above 1. A target of some billion
# parameters on an accelerator, at batch 1, has v near 1.

# %%
prompt = prompts[-1]
variants = [lambda d=d: jaxspec.generate(target, prompt, **(settings | {"drafter": d})) for d in (draft, None)]
fast, plain = [variant() for variant in variants]
seconds = np.median(cost.interleave(variants, repeats=3 if SMOKE else 15), axis=1)

found = costs[1]
print(f"tokens per round {fast.stats.tokens_per_round[0]:.2f}, expected {formulas.expected_tokens(alpha, GAMMA):.2f}")
print(f"speed-up {seconds[1] / seconds[0]:.2f}, predicted {formulas.improvement(alpha, GAMMA, found.c, found.v):.2f}")
assert fast.stats.rounds[0] <= plain.stats.rounds[0]
assert 1 <= fast.stats.tokens_per_round[0] <= GAMMA + 1

# %% [markdown]
# `jaxspec plan` does this for any pair on the command line, with v measured at every γ, and `jaxspec measure` tries a
# whole range of γ. Policies (`quickstart.ipynb`) choose γ while the text is written, from what they see.
