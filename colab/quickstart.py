# %% [markdown]
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxspec/jaxspec/blob/main/colab/quickstart.ipynb)

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
# # Quickstart
#
# A large language model writes one token per pass, and each pass reads all of its weights. Speculative decoding makes
# fewer passes: a small *draft* model drafts γ tokens, the *target* model checks all of them in one pass, and a rule
# accepts as many of them as leave the text with exactly the target's distribution
# ([Leviathan, Kalman, Matias, 2023](https://arxiv.org/abs/2211.17192)).
#
# The models here are small and were trained briefly, on descriptions of Debian packages. They show the method, not
# good translation. The first call of each kind compiles a program, which takes seconds.

# %%
import numpy as np
from IPython.display import HTML, display

from jaxspec.weights import orbax
from jaxspec.weights.loading import shipped

# GPUs and TPUs multiply float32 matrices in fewer bits, unless told. Then two tokens that are nearly equally likely may
# change places, and here texts are compared token by token.
jax.config.update("jax_default_matmul_precision", "highest")

target = jaxspec.load("debian-t5-large")
draft = jaxspec.load("debian-t5-draft")

for model in (target, draft):
    size = orbax.read_manifest(shipped()[model.name]).parameters
    print(f"{model.name}: {size / 1e6:.1f} million parameters, {model.lm.vocab_size} tokens")

# %% [markdown]
# ## Generate
#
# `generate` takes one prompt or a list of them. Temperature 0, the default, is greedy: always the most probable token.
# A notebook shows what it returns: texts, counts, and after a click every round.

# %%
prompts = [
    "translate English to German: This package contains the API documentation for the library.",
    "translate English to German: This package provides the development files and the headers.",
    "translate English to German: This package contains the shared libraries that programs need at run time.",
]
settings = dict(gamma=4, max_new_tokens=32)
out = jaxspec.generate(target, prompts, drafter=draft, **settings)
out

# %% [markdown]
# ## What happened, round by round
#
# One line is one round, which is one pass of the target. Accepted draft tokens are green. The first rejected draft
# token is red and struck through, and what followed it was thrown away. Blue is the token that the target adds itself
# in every round: in place of a rejected draft token, or after the last one if all were accepted. The first line is the
# token that reading the prompt gives.

# %%
from jaxspec import trace

row = 2
rounds = trace.of_row(out.tokens[row, : out.lengths[row]], out.trace, row)
judged = [trace.judge(each) for each in rounds]
assert any(each.accepted for each in judged) and any(each.rejected for each in judged)
HTML(trace.html(rounds, target.tokenizer))

# %% [markdown]
# ## Statistics
#
# They are counted for each prompt by itself: rows of a batch accept different numbers of draft tokens.
# `tokens_per_round` is what counts for speed; plain decoding has 1.

# %%
stats = out.stats
print("prompt  rounds  drafted  accepted  emitted  tokens per round")
for row in range(len(prompts)):
    counts = (stats.rounds[row], stats.drafted[row], stats.accepted[row], stats.emitted[row])
    print("{:6}{:8}{:9}{:10}{:9}{:18.2f}".format(row, *counts, stats.tokens_per_round[row]))

assert (stats.emitted == out.lengths).all()
assert (stats.tokens_per_round >= 1).all()

# %% [markdown]
# ## The same text as without the drafter
#
# At temperature 0 the text is the target's own, token by token. Both variants are timed interleaved, after a first call
# that compiles; medians count.
#
# The text is the same on every machine. Whether it comes sooner depends on the machine: checking five tokens must cost
# little more than checking one, which holds for large models on accelerators, and only in part for this small one on a
# CPU. `when_does_it_pay.ipynb` measures that.

# %%
from jaxspec.analysis.cost import interleave


def compare(target, prompts, drafter, **settings):
    """Texts with and without the drafter: whether they are the same, and the median time of each."""
    variants = [lambda d=d: jaxspec.generate(target, prompts, drafter=d, **settings) for d in (drafter, None)]
    fast, plain = [variant() for variant in variants]
    seconds = np.median(interleave(variants, repeats=2 if SMOKE else 9), axis=1)
    passes = [int(np.max(out.stats.rounds)) for out in (fast, plain)]
    for name, count, time in zip(("speculative", "plain"), passes, seconds, strict=True):
        print(f"{name:12}{count:4} passes of the target {1e3 * time:8.1f} ms")
    print(
        f"ratio {seconds[1] / seconds[0]:.2f}: with the drafter it is {'faster' if seconds[0] < seconds[1] else 'slower'}"
    )
    return fast, plain


fast, plain = compare(target, prompts, draft, **settings)

assert fast.texts == plain.texts
assert np.max(fast.stats.rounds) < np.max(plain.stats.rounds)

# %% [markdown]
# ## Sampling
#
# Above temperature 0 the text is random, and needs a key. It is not the text that plain sampling gives with the same
# key, but it has the same distribution: `why_it_is_exact.ipynb` shows why, and proves it. With the rule
# `jaxspec.rules.coupled()` it would be the same text, too.

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
# With a policy `gamma` is the most draft tokens of a round, and the policy chooses how many are made. `confidence` ends a draft
# after the first draft token that the drafter is unsure of. The text's distribution stays as it is.

# %%
from jaxspec import policies

careful = jaxspec.generate(target, prompts, drafter=draft, policy=policies.confidence(0.4), **sampling)

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
# With `regex`, `json_schema` or `choices` every text matches, at any temperature. Target and drafter are masked alike, so drafts
# serve here as before. Here the target would begin otherwise: the expression makes it say "Das Paket" and a colon.

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
# Where the drafter is unsure, several candidates for a position are better than one. `drafters.tree` drafts, say, three
# candidates for the next token, two after each of these, and one after each of those; the target checks all 15 in one
# pass, in which each attends to its own ancestors only. The text is the same. The first candidates of its three levels are the
# chain of three draft tokens, so it needs as many rounds as that chain, or fewer. It pays where the drafter is often unsure, if
# the wider pass costs little.

# %%
chain = jaxspec.generate(target, prompts, drafter=draft, gamma=3, max_new_tokens=32)
tree = jaxspec.generate(target, prompts, drafter=jaxspec.drafters.tree(draft, (3, 2, 1)), max_new_tokens=32)
print("rounds with a chain of 3:", chain.stats.rounds, "with a tree:", tree.stats.rounds)

assert tree.texts == plain.texts
assert (tree.stats.rounds <= chain.stats.rounds).all()

# %% [markdown]
# ## A drafter without a model
#
# Where the output repeats the input, draft tokens can be copied from it. `prompt_lookup` looks for the last few tokens
# in the prompt and in the text so far, and drafts what came after them. It costs next to nothing.
# `debian-t5-edit` is a model that repeats a sentence with one word replaced. It is part of the repository, but not of
# the installed package. One of its passes takes about a millisecond on a CPU, most of which is not arithmetic: many
# passes are saved here, but perhaps no time.

# %%
if "debian-t5-edit" in shipped():
    edit = jaxspec.load("debian-t5-edit")
    request = (
        "replace images by documents: This package contains a library for reading and writing images. "
        "It can also be used to convert images from one format to another without loss of quality."
    )
    copied, plain = compare(edit, request, jaxspec.drafters.prompt_lookup(), gamma=7, max_new_tokens=64)
    display(copied)
    assert copied.texts == plain.texts
    assert copied.stats.tokens_per_round[0] > 2
else:
    print("skipped: debian-t5-edit is not here (it is in checkpoints/ of the repository)")

# %% [markdown]
# ## A pair from the Hugging Face hub
#
# `load` takes hub ids of T5, FLAN-T5, GPT-2, Llama, Mistral, Qwen and Gemma. Target and draft must have one tokenizer.
# This pair is a download of 1.3 GB; without a connection to the hub the cell says so and goes on.

# %%
from jaxspec.weights.orbax import CheckpointError

pair = "google/flan-t5-base", "google/flan-t5-small"
try:
    large, small = (jaxspec.load(name) for name in pair)
except CheckpointError as error:
    print(f"skipped: {error.__cause__ or error}")
else:
    question = "translate English to German: The library is open on Monday, but not on Sunday."
    fast, plain = compare(large, question, small, gamma=4, max_new_tokens=32)
    display(fast)
    assert fast.texts == plain.texts

# %% [markdown]
# ## Where to go on
#
# * `why_it_is_exact.ipynb`: why the distribution does not change.
# * `when_does_it_pay.ipynb`: when it is faster, and when it is not.
# * `bring_your_own_model.ipynb`: your own network as target or draft, and a rule of your own.
# * `tpu.ipynb`: large models, split over the devices of a TPU.
