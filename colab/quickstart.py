# %% [markdown]
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxspec/jaxspec/blob/main/colab/quickstart.ipynb)
# [![Open In Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/jaxspec/jaxspec/blob/main/colab/quickstart.ipynb)

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
# # Quickstart
#
# A large language model writes one token per pass, and each pass reads all of its weights.
# Speculative decoding makes fewer passes: a small *draft* model drafts γ tokens, the *target* model
# checks all of them in one pass, and a rule accepts as many of them as leave the text with exactly
# the target's distribution ([Leviathan, Kalman, Matias, 2023](https://arxiv.org/abs/2211.17192)).
#
# The models here are small and were trained briefly, on descriptions of Debian packages. They show
# the method, not good translation. The first call of each kind compiles a program, which takes
# seconds.

# %%
import numpy as np
from IPython.display import HTML, display

from jaxspec.weights import orbax
from jaxspec.weights.loading import shipped

# GPUs and TPUs multiply float32 matrices in fewer bits, unless told. Then two tokens that are
# nearly equally likely may change places, and here texts are compared token by token.
jax.config.update("jax_default_matmul_precision", "highest")

target = jaxspec.load("debian-t5-large")
draft = jaxspec.load("debian-t5-draft")

for model in (target, draft):
    size = orbax.read_manifest(shipped()[model.name]).parameters
    print(f"{model.name}: {size / 1e6:.1f} million parameters, {model.lm.vocab_size} tokens")

# %% [markdown]
# ## Generate
#
# One prompt and γ = 3, as `jaxspec generate` has it on the command line. Temperature 0, the
# default, is greedy: always the most probable token. A notebook shows what `generate` returns:
# text, counts, and after a click every round.

# %%
prompts = [
    "translate English to German: This package contains the API documentation for the library.",
    "translate English to German: This package provides the development files and the headers.",
    "translate English to German: This package contains the shared libraries that programs need "
    "at run time.",
]
settings = dict(gamma=3, max_new_tokens=32)
out = jaxspec.generate(target, prompts[2], drafter=draft, **settings)
out

# %% [markdown]
# ## What happened, round by round
#
# One line is one round, which is one pass of the target. Accepted draft tokens are green. The first
# rejected draft token is red and struck through, and what followed it was thrown away. Blue is the
# token that the target adds itself in every round: in place of a rejected draft token, or after the
# last one if all were accepted. The first line is the token that reading the prompt gives.

# %%
from jaxspec import trace

rounds = trace.of_row(out.tokens[0, : out.lengths[0]], out.trace, 0)
judged = [trace.judge(each) for each in rounds]
assert any(each.accepted for each in judged) and any(each.rejected for each in judged)
HTML(trace.html(rounds, target.tokenizer))

# %% [markdown]
# ## The same text, sooner
#
# At temperature 0 the text is the target's own, token by token. Both variants are timed
# interleaved, after a first call that compiles; medians count. The text is the same on every
# machine, and so is the number of passes. Times are this machine's.

# %%
import matplotlib.pyplot as plt

from jaxspec.analysis.cost import interleave


def compare(target, prompts, drafter, **settings):
    """Generates with the drafter and without it, and says how long both took. Returns both results
    and the speed-up.
    """
    variants = [
        lambda d=d: jaxspec.generate(target, prompts, drafter=d, **settings)
        for d in (drafter, None)
    ]
    fast, plain = [variant() for variant in variants]
    seconds = np.median(interleave(variants, repeats=2 if SMOKE else 15), axis=1)
    passes = [int(np.max(out.stats.rounds)) for out in (fast, plain)]
    speed_up = float(seconds[1] / seconds[0])
    print(f"plain {passes[1]} passes, {1e3 * seconds[1]:.1f} ms; ", end="")
    print(
        f"with the drafter {passes[0]} passes, {1e3 * seconds[0]:.1f} ms: {speed_up:.2f} times as "
        "fast"
    )
    return fast, plain, speed_up


speed_ups = []
for prompt in prompts:
    fast, plain, speed_up = compare(target, prompt, draft, **settings)
    speed_ups.append(speed_up)
    assert fast.texts == plain.texts
    assert np.max(fast.stats.rounds) < np.max(plain.stats.rounds)
print(
    f"one prompt at a time: {np.median(speed_ups):.2f} times as fast (median of {len(prompts)} "
    "prompts)"
)

# %% [markdown]
# ## Where it does not pay: a batch
#
# A pass over one row leaves most of a machine's arithmetic idle, so that checking three more tokens
# costs little. A batch uses that arithmetic for its rows. Then every draft token that is checked
# takes time, and a batch goes on until its slowest row has ended. How soon the gain is gone depends
# on the machine: on two CPU cores some rows are enough, and an accelerator has arithmetic for
# dozens. `when_does_it_pay.ipynb` measures why.

# %%
from jaxspec.files import corpus

texts = sorted((row["input"] for row in corpus.heldout("translation")[:64]), key=len)
by_batch = {1: float(np.median(speed_ups))}
for size in (4, 16):
    print(f"{size:2} prompts at a time: ", end="")
    fast, plain, by_batch[size] = compare(target, texts[:size], draft, **settings)
    assert fast.texts == plain.texts

figure, axes = plt.subplots(figsize=(5, 2.6), layout="constrained")
bars = axes.bar(
    [str(size) for size in by_batch], list(by_batch.values()), color="#0072B2", width=0.5
)
axes.bar_label(bars, fmt="%.2f×")
axes.axhline(1, color="black", linewidth=0.8)
axes.set(xlabel="prompts at a time", ylabel="speed-up", ylim=(0, 1.2 * max(by_batch.values())))
axes.set_title("above the line the drafter pays", fontsize=10)
plt.show()

# %% [markdown]
# ## Your model's id here
#
# `load` takes a folder, a GGUF file, or the hub id of a T5, Llama, Mistral, Qwen, Gemma or GPT-2
# and [many more](https://github.com/jaxspec/jaxspec/blob/main/docs/models.md). A drafter without a
# model needs nothing but the target. `prompt_lookup` looks for the last few tokens in the text so
# far, and drafts what came after them: that pays where text repeats itself, as code does. The one
# below is a download of 1.5 GB; without a connection the cell says so.

# %%
from jaxspec.weights.orbax import CheckpointError

MODEL = "Qwen/Qwen3-0.6B"  # your model's id here
CODE = """def area(shape):
    if shape.kind == "circle":
        return 3.14159 * shape.radius ** 2
    if shape.kind == "square":
        return shape.side ** 2

def perimeter(shape):
    if shape.kind == "circle":
        return"""
try:
    yours = jaxspec.load(MODEL)
except CheckpointError as error:
    print(f"skipped: {error.__cause__ or error}")
else:
    fast, plain, _ = compare(
        yours, CODE, jaxspec.drafters.prompt_lookup(), gamma=4, max_new_tokens=24 if SMOKE else 96
    )
    display(fast)
    assert fast.texts == plain.texts

# %% [markdown]
# ## Statistics
#
# They are counted for each prompt by itself: rows of a batch accept different numbers of draft
# tokens. `tokens_per_round` is what counts for speed; plain decoding has 1.

# %%
settings = dict(gamma=4, max_new_tokens=32)
out = jaxspec.generate(target, prompts, drafter=draft, **settings)
plain = jaxspec.generate(target, prompts, max_new_tokens=32)
stats = out.stats
print("prompt  rounds  drafted  accepted  emitted  tokens per round")
for row in range(len(prompts)):
    counts = (stats.rounds[row], stats.drafted[row], stats.accepted[row], stats.emitted[row])
    print("{:6}{:8}{:9}{:10}{:9}{:18.2f}".format(row, *counts, stats.tokens_per_round[row]))

assert out.texts == plain.texts
assert (stats.emitted == out.lengths).all()
assert (stats.tokens_per_round >= 1).all()

# %% [markdown]
# ## Sampling
#
# Above temperature 0 the text is random, and needs a key. It is not the text that plain sampling
# gives with the same key, but it has the same distribution: `why_it_is_exact.ipynb` shows why, and
# proves it. With the rule `jaxspec.rules.coupled()` it would be the same text, too.

# %%
sampling = dict(temperature=0.8, key=jax.random.key(0), **settings)
out = jaxspec.generate(target, prompts, drafter=draft, **sampling)
for text in out.texts:
    print(text)
print("accepted of what was drafted:", np.round(out.stats.acceptance_rate, 2))

again = jaxspec.generate(target, prompts, drafter=draft, **sampling)
assert out.exact
assert again.texts == out.texts  # the same key, the same text

# %% [markdown]
# ## A policy for γ
#
# With a policy `gamma` is the most draft tokens of a round, and the policy chooses how many are
# made. `confidence` ends a draft after the first draft token that the drafter is unsure of. The
# text's distribution stays as it is.

# %%
from jaxspec import policies

careful = jaxspec.generate(
    target, prompts, drafter=draft, policy=policies.confidence(0.4), **sampling
)

per_round = {}
for name, result in (("always 4", out), ("while confident", careful)):
    drafted = int(result.stats.drafted.sum())
    per_round[name] = drafted / int(result.stats.rounds.sum())
    accepted = result.stats.accepted.sum() / drafted
    print(f"{name:18}{per_round[name]:5.2f} draft tokens a round, {accepted:.0%} of them accepted")

assert per_round["while confident"] < per_round["always 4"]

# %% [markdown]
# ## Text of a given form
#
# With `regex`, `json_schema` or `choices` every text matches, at any temperature. Target and
# drafter are masked alike, so drafts serve here as before. Here the target would begin otherwise:
# the expression makes it say "Das Paket" and a colon.

# %%
import re

form = r"Das Paket (enthält|bietet): [A-Za-zäöüÄÖÜß -]+\."
matching = jaxspec.generate(target, prompts, drafter=draft, regex=form, **settings)
for text in matching.texts:
    print(text)

assert all(re.fullmatch(form, text) for text in matching.texts)

# %% [markdown]
# ## A tree
#
# Where the drafter is unsure, several candidates for a position are better than one.
# `drafters.tree` drafts, say, three candidates for the next token, two after each of these, and one
# after each of those; the target checks all 15 in one pass, in which each attends to its own
# ancestors only. The text is the same. The first candidates of its three levels are the chain of
# three draft tokens, so it needs as many rounds as that chain, or fewer. It pays where the drafter
# is often unsure, if the wider pass costs little.

# %%
chain = jaxspec.generate(target, prompts, drafter=draft, gamma=3, max_new_tokens=32)
tree = jaxspec.generate(
    target, prompts, drafter=jaxspec.drafters.tree(draft, (3, 2, 1)), max_new_tokens=32
)
print("rounds with a chain of 3:", chain.stats.rounds, "with a tree:", tree.stats.rounds)

assert tree.texts == plain.texts
assert (tree.stats.rounds <= chain.stats.rounds).all()

# %% [markdown]
# ## Text that repeats the prompt
#
# `debian-t5-edit` is a model that repeats a sentence with one word replaced, so that
# `prompt_lookup` copies nearly all of it. It is part of the repository, but not of the installed
# package. One of its passes takes about a millisecond on a CPU, most of which is not arithmetic:
# many passes are saved here, but perhaps no time.

# %%
if "debian-t5-edit" in shipped():
    edit = jaxspec.load("debian-t5-edit")
    request = (
        "replace images by documents: This package contains a library for reading and writing "
        "images. "
        "It can also be used to convert images from one format to another without loss of quality."
    )
    copied, plain, _ = compare(
        edit, request, jaxspec.drafters.prompt_lookup(), gamma=7, max_new_tokens=64
    )
    display(copied)
    assert copied.texts == plain.texts
    assert copied.stats.tokens_per_round[0] > 2
else:
    print("skipped: debian-t5-edit is not here (it is in checkpoints/ of the repository)")

# %% [markdown]
# ## A pair from the Hugging Face hub
#
# Target and draft must have one tokenizer. This pair is a download of 1.3 GB; without a connection
# to the hub the cell says so and goes on.

# %%
pair = "google/flan-t5-base", "google/flan-t5-small"
try:
    large, small = (jaxspec.load(name) for name in pair)
except CheckpointError as error:
    print(f"skipped: {error.__cause__ or error}")
else:
    question = "translate English to German: The library is open on Monday, but not on Sunday."
    fast, plain, _ = compare(large, question, small, gamma=4, max_new_tokens=32)
    display(fast)
    assert fast.texts == plain.texts

# %% [markdown]
# ## Where to go on
#
# * `real_model.ipynb`: Gemma 3 270M with drafters that need no model, 1.2 to 2.9 times as fast on a
# CPU.
# * `why_it_is_exact.ipynb`: why the distribution does not change.
# * `when_does_it_pay.ipynb`: when it is faster, and when it is not.
# * `bring_your_own_model.ipynb`: your own network as target or draft, and a rule of your own.
# * `tpu.ipynb`: large models, split over the devices of a TPU.
