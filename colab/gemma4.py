# %% [markdown]
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxspec/jaxspec/blob/main/colab/gemma4.ipynb)
# [![Open In Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/jaxspec/jaxspec/blob/main/colab/gemma4.ipynb)

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
# # Gemma 4 on a Colab TPU, faster and with the same text
#
# Gemma 4 E2B or E4B in bfloat16, with drafters that need no second model, and with Google's
# assistant. On a runtime with a TPU or a GPU the cells below load the real model from the Hugging
# Face hub. Elsewhere they make a small one of random weights with the same kinds of layers: what
# they show of layers, caches and equal texts holds there, too; how fast they are does not.
#
# **What was run.** The cells ran on a CPU with the small model; no TPU has run them yet. The
# compilers for the chips have compiled both sizes in bfloat16 for one row: a prompt of 512 tokens
# and 512 new ones. The caches have room for these 1,024 tokens (E4B's take 38 MB). Times are
# estimates of the TPU's compiler, no measurements (`python -m benchmarks.estimates --target
# gemma-4-e2b --draft prompt_lookup --topology v5e --prompt 512 --max-new-tokens 512`):
#
# | model and chip | drafter, γ | weights and caches | besides | a step reads at least | a step or round, estimated |
# |---|---|---|---|---|---|
# | E2B, TPU v5e, 16 GB | none | 9.3 GB | 0.34 GB | 4.57 GB | 5.5 ms |
# | | prompt lookup, 5 | 9.3 GB | 0.40 GB | 4.57 GB | 5.5 ms |
# | | n-grams, 5 | 9.3 GB | 0.40 GB | 4.57 GB | 5.8 ms |
# | | Google's assistant, 4 | 9.4 GB | 0.34 GB | 4.57 GB | 6.5 ms |
# | E4B, TPU v5e, 16 GB | none | 14.93 GB | 0.55 GB | 9.33 GB | 11.3 ms (64 + 128 tokens) |
# | E4B, H100, 80 GB | none | 14.93 GB | 0.10 GB | 9.33 GB | |
#
# A round takes about as long as a step, so two tokens a round are nearly twice as fast. E4B just
# fits a v5e; for longer prompts take E2B there, or int8. The difference between the weights and
# what a step reads are the embeddings per layer, 4.7 GB of E2B and 5.6 GB of E4B, of which a token
# looks up one row.

# %%
import collections
import dataclasses

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jaxspec.analysis import random_model
from jaxspec.core import Model
from jaxspec.nets import decoder
from jaxspec.weights.hf_families import gemma4

NAME, REAL = "google/gemma-4-E2B-it", device.platform != "cpu" and not SMOKE
if REAL:
    model = jaxspec.load(NAME, dtype="bfloat16")  # HF_TOKEN, if the hub asks for one
else:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 512,
        "vocab_size_per_layer_input": 512,
    }
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "global_head_dim": 32,
    }
    sizes |= {
        "num_hidden_layers": 10,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
    }
    sizes |= {"num_kv_shared_layers": 5, "hidden_size_per_layer_input": 8, "sliding_window": 16}
    config = gemma4.read({"model_type": "gemma4_text", "final_logit_softcapping": 30.0} | sizes)
    model = Model(
        decoder.language_model(config),
        random_model.random_params(config, "float32", jax.random.key(3)),
        config=config,
    )
print(
    f"{len(model.config.layers)} layers, "
    f"{sum(x.size for x in jax.tree.leaves(model.params)) / 1e6:.1f}M parameters"
)

# %% [markdown]
# ## Its layers
#
# Local layers have small heads and a window, global ones large heads. The last layers have no keys
# of their own: they read the cache of the last layer of their kind that has some. Caches of local
# layers are rings, so a long prompt costs little.

# %%
kinds = collections.Counter(
    (
        "global" if layer.attention.window is None else "local",
        layer.attention.head_dim,
        "own keys" if layer.attention.shares is None else f"keys of layer {layer.attention.shares}",
    )
    for layer in model.config.layers
)
for (kind, head_dim, keys), count in kinds.items():
    print(f"{count:3} {kind:6} layers, heads of {head_dim}, {keys}")
network = jaxspec.nets.net_of(model.config)
in_bfloat16 = dataclasses.replace(model.config, dtype="bfloat16")
short, long = (network.cache_bytes(in_bfloat16, tokens) for tokens in (1024, 8192))
print(f"caches of a row: {short / 1e6:.2f} MB for 1,024 tokens, {long / 1e6:.2f} MB for 8,192")
assert long < 8 * short and any("keys of layer" in keys for _, _, keys in kinds)

# %% [markdown]
# ## The same text, in fewer passes
#
# Prompt lookup proposes what followed the same words before; the n-gram drafter learns from the row
# and from what the model predicted for it. Each round checks six tokens in one pass. Greedy text is
# that of plain decoding, token for token.

# %%
import time

NEW = 24 if SMOKE else 128
CODE = "def area(shape):\n    if shape.kind == 'circle':\n        return 3.14 * shape.radius ** 2\n"
question = (
    "Add a docstring and type hints to this function. Answer with the code alone.\n\n" + CODE * 2
)
# token ids that repeat themselves, as code does
repeated = np.random.default_rng(0).integers(1, 500, 12).tolist() * 3
prompt = [{"role": "user", "content": question}] if REAL else repeated


def timed(**options):
    """Makes a warm call, and returns its tokens per second and its output."""
    jaxspec.generate(model, prompt, max_new_tokens=NEW, **options)
    begin = time.perf_counter()
    out = jaxspec.generate(model, prompt, max_new_tokens=NEW, **options)
    return int(out.lengths.sum()) / (time.perf_counter() - begin), out


plain, expected = timed()
print(f"plain         {plain:7.1f} tokens/s")
drafters = jaxspec.drafters
setups = {"prompt lookup": drafters.prompt_lookup(), "n-grams": drafters.online_ngram()}
speeds = {"plain": plain}
for name, drafter in setups.items():
    fast, out = timed(drafter=drafter, gamma=5)
    speeds[name] = fast
    per_round = float(out.stats.tokens_per_round[0])
    print(f"{name:13} {fast:7.1f} tokens/s, {fast / plain:.2f} x, {per_round:.2f} tokens a round")
    # In float32 texts are the same. In bfloat16 near ties may fall either way, as they do between
    # two plain programs.
    assert REAL or out.tokens.tolist() == expected.tokens.tolist()

# %% [markdown]
# ## Google's assistant
#
# Google publishes a drafter beside each size. Its layers have no keys: they attend to what the
# model has cached, so it reads no prompt. It begins with the model's last hidden state. Elsewhere a
# small one with random weights stands for it, whose draft tokens are nearly always rejected: its
# text is the same, too.

# %%
from jaxspec.draft_heads import assistant, formats

if REAL:
    helper = jaxspec.load_drafter(f"{NAME}-assistant", target=model)
else:
    inner = sizes | {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    inner |= {
        "model_type": "gemma4_text",
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 0,
    }
    table = {
        "model_type": "gemma4_assistant",
        "text_config": inner,
        "backbone_hidden_size": 64,
        "num_centroids": 64,
    }
    table |= {"use_ordered_embeddings": True, "centroid_intermediate_top_k": 8}
    shape = assistant.read(table, {}, formats.target_shape(model))
    head = jaxspec.DraftHead(assistant.head(shape), assistant.init(shape, jax.random.key(4)))
    helper = drafters.assistant(head, model)
for name, drafter, gamma in (
    ("chain", helper, 4),
    ("tree", drafters.tree(helper, (3, 2, 1)), None),
):
    fast, out = timed(drafter=drafter, **({} if gamma is None else {"gamma": gamma}))
    speeds[f"assistant, {name}"] = fast
    per_round = float(out.stats.tokens_per_round[0])
    print(f"{name:13} {fast:7.1f} tokens/s, {fast / plain:.2f} x, {per_round:.2f} tokens a round")
    assert REAL or out.tokens.tolist() == expected.tokens.tolist()

# %%
figure, axes = plt.subplots(figsize=(5.6, 2.4), layout="constrained")
bars = axes.barh(list(speeds), list(speeds.values()), color="#0072B2")
axes.bar_label(bars, [f" {speed / plain:.2f}×" for speed in speeds.values()])
axes.axvline(plain, color="black", linewidth=0.8)
axes.set(xlabel=f"tokens/s on {device.device_kind}", xlim=(0, 1.2 * max(speeds.values())))
axes.set_title(
    NAME if REAL else "a small model of random weights: the form of the picture only", fontsize=10
)
axes.invert_yaxis()
plt.show()

# %% [markdown]
# ## A token tree
#
# Every node of a tree reads its own ancestors, in rings and shared caches alike, and its own
# embeddings per layer.

# %%
tree = drafters.prompt_lookup(candidates=3)
_, out = timed(drafter=tree, gamma=4)
print(f"{float(out.stats.tokens_per_round[0]):.2f} tokens a round with up to three continuations")
assert REAL or out.tokens.tolist() == expected.tokens.tolist()

# %% [markdown]
# ## Sampling
#
# At temperature 1 the drafter proposes the same way, and the rejection rule keeps the model's
# distribution exactly: the same key gives the same text again.

# %%
sampled = dict(temperature=1.0, key=jax.random.key(0), drafter=drafters.prompt_lookup(), gamma=5)
first, second = (jaxspec.generate(model, prompt, max_new_tokens=NEW, **sampled) for _ in range(2))
assert first.tokens.tolist() == second.tokens.tolist() and bool(jnp.all(first.lengths <= NEW))
print(first.texts[0] if REAL else first.tokens[0].tolist())

# %% [markdown] An adapter of your own is merged as the model is loaded: `jaxspec.load(NAME,
# adapter="me/my-lora", dtype="bfloat16")`. The page
# [assistant](https://github.com/jaxspec/jaxspec/blob/main/docs/drafters/assistant.md) says more of
# Google's drafters, and [docs/pairs.md](https://github.com/jaxspec/jaxspec/blob/main/docs/pairs.md)
# has other pairs.
