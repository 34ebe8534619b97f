# %% [markdown]
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxspec/jaxspec/blob/main/colab/tpu.ipynb)
# [![Open In Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/jaxspec/jaxspec/blob/main/colab/tpu.ipynb)

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

# Where there is no accelerator, this simulates 8 devices. It must run before jax is imported.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

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
# # Large models on a TPU
#
# From an empty TPU to speculative decoding that has been measured: which pair fits, in which dtype,
# how to split it over the devices, which γ; then loading, warming up, measuring. It is for a Colab
# runtime with a TPU and for a Cloud TPU VM; GPUs do as well. One chip comes first, which is what
# Colab and Kaggle lend. Where there is no accelerator, the same cells run on 8 simulated devices
# with the shipped pair: what they show of placement and of text holds there, too; how long things
# take does not.

# %%
import math
import time

import matplotlib.pyplot as plt
import numpy as np

# The first cell keeps compiled programs on disk, for the next process: here small ones, too. On
# Colab the folder goes with the runtime; one on Google Drive stays, if JAX_COMPILATION_CACHE_DIR
# names it before the first cell.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

# As in quickstart: texts in float32 are compared token by token below. Models in bfloat16 compute
# in bfloat16 all the same.
jax.config.update("jax_default_matmul_precision", "highest")

GIB = 2**30
SIMULATED = device.platform == "cpu"
for each in jax.local_devices():
    memory = each.memory_stats() or {}
    print(
        each,
        f"{memory['bytes_limit'] / GIB:.1f} GiB"
        if "bytes_limit" in memory
        else "(no memory of its own)",
    )

# %% [markdown]
# ## One chip: what Colab and Kaggle have
#
# Colab lends one v5e (16 GB) or one v6e (32 GB). Where there are several chips, as on Kaggle, this
# section uses the first. jaxspec has the shapes of published models, so that it is known before a
# download which of them fit, in which dtype, and how long a step takes at least: every step reads
# all weights that decode and the row's cache once. At batch 1 a pass over γ + 1 tokens reads no
# more than a pass over one, so v is 1 here, and the speed-up is what α = 0.75 gives at the best γ.
# All of these are best cases. The cell after the next measures one of them.

# %%
import dataclasses

from jaxspec.analysis import memory as sizes
from jaxspec.analysis import plan as planning
from jaxspec.analysis import roofline
from jaxspec.nets import net_of
from jaxspec.weights.hf_families import FAMILIES

SHAPES = {name: config for family in FAMILIES for name, config in family.sizes.items()}
CHIPS = {"tpu-v5e": "v5e, 16 GB", "tpu-v6e": "v6e, 32 GB"}
# drafters; where there is none, prompt look-up or Google's assistant drafts, and the text decides
PAIRS = {
    "flan-t5-large": "flan-t5-small",
    "flan-t5-xl": "flan-t5-small",
    "gemma-3-4b": "gemma-3-270m",
    "gemma-4-e4b": None,
    "qwen3-4b": "qwen3-0.6b",
    "qwen3-8b": "qwen3-0.6b",
}
# tokens of a row, of these an encoder-decoder's prompt; the acceptance rate
ROW, PROMPT, ALPHA = 1024, 512, 0.75
# bytes of logits and temporaries: for Gemma 4 E4B the TPU's compiler counted 0.55 GB
BESIDES = 0.6e9


def one_row_bytes(name, dtype):
    """Weights in a dtype, and the cache of one row."""
    config = dataclasses.replace(SHAPES[name], dtype="bfloat16")
    return sizes.weight_bytes(SHAPES[name], dtype) + net_of(config).cache_bytes(config, ROW, PROMPT)


def step_seconds(name, dtype, chip):
    """The least time of a step: the bytes that it reads, over the bandwidth."""
    load = roofline.load_of(
        dataclasses.replace(SHAPES[name], dtype="bfloat16"), row=ROW, prompt=PROMPT
    )
    return (load._replace(dtype=dtype).weight_bytes + load.cache_bytes) / roofline.machine(
        chip
    ).bandwidth


def estimate(target, draft, dtype, chip):
    """Bytes of a pair, the least seconds of a step, and the plan for α."""
    total = one_row_bytes(target, dtype) + (one_row_bytes(draft, dtype) if draft else 0)
    step = step_seconds(target, dtype, chip)
    c = step_seconds(draft, dtype, chip) / step if draft else 0.0
    return total, step, planning.plan(ALPHA, c, np.ones(17))


print(
    f"{'target, drafter':28}{'stored':>9}{'GB':>6}"
    + "".join(f"   {chip}: {'step':>9}, speed-up" for chip in CHIPS.values())
)
fitting, total_bytes = {}, {}
for target_name, draft_name in PAIRS.items():
    for dtype in ("bfloat16", "int8"):
        cells = []
        for chip in CHIPS:
            total, step, best = estimate(target_name, draft_name, dtype, chip)
            fitting[target_name, dtype, chip] = total + BESIDES < roofline.machine(chip).memory
            speed_up = (
                f"{best.improvement:.1f}× (γ = {best.gamma})" if draft_name else "by the text"
            )
            cell = f"{1e3 * step:.1f} ms, {speed_up}"
            cells.append(cell if fitting[target_name, dtype, chip] else "does not fit")
        total_bytes[target_name, dtype] = total
        title = f"{target_name}, {draft_name or 'look-up'}"
        print(f"{title:28}{dtype:>9}{total / 1e9:6.1f}" + "".join(f"{cell:>33}" for cell in cells))

figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
for offset, (dtype, colour) in zip(
    (-0.2, 0.2), (("bfloat16", "#0072B2"), ("int8", "#009E73")), strict=True
):
    heights = [total_bytes[name, dtype] / 1e9 for name in PAIRS]
    axes.barh(np.arange(len(PAIRS)) + offset, heights, height=0.38, color=colour, label=dtype)
for chip, title in CHIPS.items():
    axes.axvline(roofline.machine(chip).memory / 1e9, color="black", linewidth=0.8)
    axes.text(roofline.machine(chip).memory / 1e9, -0.75, title, ha="right", fontsize=8)
axes.set_yticks(range(len(PAIRS)), list(PAIRS))
axes.set(
    xlabel="GB: both models' weights, and caches of one row",
    xlim=(0, 33),
    ylim=(len(PAIRS) - 0.4, -1),
)
axes.legend(loc=(0.7, 0.6))
plt.show()

assert (
    fitting["gemma-4-e4b", "bfloat16", "tpu-v5e"] and not fitting["qwen3-8b", "bfloat16", "tpu-v5e"]
)
assert fitting["qwen3-8b", "int8", "tpu-v5e"] and all(
    fits for (*_, chip), fits in fitting.items() if chip == "tpu-v6e"
)

# %% [markdown] Now one of these rows is measured: with random weights at the published shape, which
# cost what the real ones do and need no download. Name another row in `CHOSEN`. The cell prints
# what was measured beside the estimate, as a row to paste into an issue or into
# [docs/tpu.md](https://github.com/jaxspec/jaxspec/blob/main/docs/tpu.md): no TPU's row is there
# yet. Without an accelerator it measures a small model on this CPU, which shows the row's form and
# nothing of a TPU.

# %%
from jaxspec.analysis import cost, random_model
from jaxspec.decode.request import prepare

CHOSEN = ("flan-t5-small", None, "float32") if SIMULATED else ("qwen3-4b", "qwen3-0.6b", "bfloat16")
# jax's names
NAMES = {
    "TPU v5 lite": "tpu-v5e",
    "TPU v5e": "tpu-v5e",
    "TPU v6 lite": "tpu-v6e",
    "TPU v6e": "tpu-v6e",
}
GAMMA = 4


def measured(target_name, draft_name, dtype):
    """Bytes and costs of a pair of random weights on the first device, for one row of ROW
    tokens.
    """
    with jax.default_device(device):
        model = random_model.random_model(target_name, dtype, seed=0)
        draft_model = random_model.random_model(draft_name, dtype, seed=1) if draft_name else model
        prompt = random_model.random_prompt(model, rows=1, tokens=PROMPT)
        prepared = prepare(
            model, prompt, drafter=draft_model, gamma=GAMMA, max_new_tokens=ROW - PROMPT
        )
        costs = cost.measure(prepared, repeats=3 if SMOKE else 9, inner=3 if SMOKE else None)
    held = (device.memory_stats() or {}).get("peak_bytes_in_use")
    if held is None:  # a CPU does not say
        held = sum(
            x.nbytes
            for x in jax.tree.leaves((model.params, draft_model.params if draft_name else None))
        )
    return held, costs


target_name, draft_name, dtype = CHOSEN
held, costs = measured(*CHOSEN)
c = costs.c if draft_name else 0.0
reached = planning.plan(ALPHA, c, 1 + max(costs.v - 1, 0) / GAMMA * np.arange(17))
chip = NAMES.get(device.device_kind)
least_bytes, least_step, best = estimate(target_name, draft_name, dtype, chip or "tpu-v5e")
least_ms = f"{1e3 * least_step:.2f}" if chip else "–"
most = f"{best.improvement:.2f}" if chip else "–"
print(
    "| chip | jax | target, drafter | stored | GB, estimated | GB, peak | step, at least, ms | "
    "measured, ms | c | v(4) ",
    end="",
)
print(f"| speed-up at α = {ALPHA}, at most | from measured c and v |\n" + "|---" * 12 + "|")
print(
    f"| {device.device_kind} | {jax.__version__} | {target_name}, {draft_name or 'look-up'} | "
    f"{dtype} ",
    end="",
)
print(
    f"| {least_bytes / 1e9:.2f} | {held / 1e9:.2f} | {least_ms} | {costs.target_ms:.2f} | {c:.3f} "
    f"| {costs.v:.2f} ",
    end="",
)
print(f"| {most} | {reached.improvement:.2f} (γ = {reached.gamma}) |")
assert held > 0.8 * sizes.weight_bytes(SHAPES[target_name], dtype) and costs.target_ms > 0
assert chip is None or costs.target_ms > 0.9e3 * least_step  # no step is faster than its bytes

# %% [markdown]
# ## Several chips: will it fit?
#
# Larger pairs need several chips. `jaxspec models` lists the shapes that jaxspec knows.
#
# * **Parameters** take two bytes each in bfloat16, in which TPUs multiply. Norms, biases and logits
# stay in float32.
# * **The cache** holds keys and values of every layer, for each token of each row. An
# encoder-decoder keeps as much again for each token of its prompt.
#
# A mesh `data=d,model=m` splits matrices and heads m ways, and the rows of a batch d ways:
# parameters on a device shrink with m only, caches with both. What m does not divide is whole on
# every device (`sharding.kept_whole` tells).

# %%
import functools

from jax.sharding import AbstractMesh

from jaxspec import sharding
from jaxspec.nets import axes_of

GRIDS = {m: AbstractMesh((1, m), ("data", "model")) for m in (1, 4, 8, 16)}


@functools.cache
def shapes_of(config):
    """The parameters, without any numbers in them."""
    return jax.eval_shape(lambda: net_of(config).init(config, jax.random.key(0)))


def parameter_bytes(config, mesh):
    """Bytes of the parameters on each device: of matrices in bfloat16, and of vectors in
    float32.
    """
    shapes = shapes_of(config)
    leaves, places = (
        jax.tree.leaves(shapes),
        jax.tree.leaves(sharding.parameters(shapes, axes_of(config), mesh)),
    )
    each = zip(leaves, places, strict=True)
    return sum(
        (2 if x.ndim > 1 else 4) * math.prod(place.shard_shape(x.shape)) for x, place in each
    )


def cache_bytes(config, rows, tokens, mesh):
    """Bytes of keys and values on each device: of `tokens` tokens a row, and as many of an
    encoder's prompt.
    """
    of_row = roofline.load_of(
        dataclasses.replace(config, dtype="bfloat16"), row=tokens, prompt=tokens
    ).cache_bytes
    shape = rows, axes_of(config).parts["kv_heads"], tokens, 1
    part = sharding.cache(
        jax.ShapeDtypeStruct(shape, "bfloat16"), axes_of(config), mesh
    ).shard_shape(shape)
    return of_row * rows * math.prod(part) / math.prod(shape)


def fits(names, rows, mesh):
    """GiB of parameters and of caches on each device, and whether that leaves a tenth of it for all
    else.
    """
    weights = sum(parameter_bytes(SHAPES[name], mesh) for name in names) / GIB
    caches = sum(cache_bytes(SHAPES[name], rows, TOKENS, mesh) for name in names) / GIB
    return weights, caches, weights + caches < 0.9 * CHIP


ROWS, TOKENS = 16, 512
CHIP = 16  # GiB of a v5e; 32 of a v4 and a v6e, 95 of a v5p (Cloud TPU documentation)
pairs = {
    "T5 v1.1 XXL, small": ("t5-v1_1-xxl", "t5-v1_1-small"),
    "Llama 3.1 8B, 3.2 1B": ("llama-3.1-8b", "llama-3.2-1b"),
    "Llama 3.1 70B, 8B": ("llama-3.1-70b", "llama-3.1-8b"),
}
print(
    f"GiB on each device: parameters + cache of {ROWS} rows of {TOKENS} tokens; * fits a chip of "
    f"{CHIP} GiB"
)
print(f"{'':22}" + "".join(f"{f'model={m}':>16}" for m in GRIDS))
needed = {}
for title, names in pairs.items():
    cells = []
    for m, grid in GRIDS.items():
        weights, caches, enough = fits(names, ROWS, grid)
        needed[title, m] = weights, caches
        cells.append(f"{weights:.1f} + {caches:.1f}{'*' if enough else ' '}")
    print(f"{title:22}" + "".join(f"{cell:>16}" for cell in cells))

for title in pairs:
    assert np.isclose(8 * needed[title, 8][0], needed[title, 1][0], rtol=0.2)
assert sum(needed["T5 v1.1 XXL, small", 1]) > CHIP > sum(needed["T5 v1.1 XXL, small", 4])
llama = SHAPES["llama-3.1-70b"]
print("on model=16 Llama 3.1 70B keeps whole:", *sharding.kept_whole(axes_of(llama), GRIDS[16]))
# its caches, with 8 key-value heads
assert needed["Llama 3.1 70B, 8B", 16][1] == needed["Llama 3.1 70B, 8B", 1][1]

# %% [markdown]
# ## Which γ?
#
# A pass reads every weight once, and multiplies it with every token that it is fed. The slower of
# the two counts (the *roofline*): at batch 1 a TPU waits for memory, and checking γ more tokens is
# free (v = 1). With many rows it is arithmetic that takes long, and speculation stops paying. The
# best γ follows from α, c and v; α depends on the task, and the paper found 0.5 to 0.9.
#
# This is the best case: n devices have n times the bandwidth and n times the arithmetic of one, and
# nothing is lost between them. Real passes are slower, a small drafter's by most, so that c is
# larger than here. On the command line: `jaxspec plan --alpha 0.75 --target t5-v1_1-xxl --draft
# t5-v1_1-small --device tpu-v5e`.

# %%
from jaxspec.analysis.roofline import Machine, machine

one = machine("tpu-v5e")
eight = Machine(8 * one.bandwidth, 8 * one.bfloat16, None)


def load(name):
    """What a pass needs, in the middle of a row."""
    config = dataclasses.replace(SHAPES[name], dtype="bfloat16")
    return roofline.load_of(config, row=TOKENS // 2, prompt=TOKENS)


print(f"{'8 x TPU v5e, α = 0.75':22}{'batch':>7}{'c':>7}{'v(γ)':>7}{'γ':>4}{'speed-up':>10}")
plans = {}
for title, (large, small) in pairs.items():
    for batch in (1, 32, 512):
        weights, caches, enough = fits((large, small), batch, GRIDS[8])
        if not enough:
            print(
                f"{title:22}{batch:7}   does not fit: {weights:.1f} + {caches:.1f} GiB on each of 8"
            )
            continue
        v = roofline.verify_cost(eight, load(large), np.arange(17), batch)
        c = float(roofline.draft_cost(eight, load(small), load(large), batch))
        found = plans[title, batch] = planning.plan(0.75, c, v, batch=batch)
        print(
            f"{title:22}{batch:7}{found.c:7.3f}{found.v:7.2f}{found.gamma:4}{found.improvement:10.2f}"
        )
        assert batch > 1 or (np.allclose(v, 1) and found.gamma > 0)
print(
    f"weights alone: a pass takes as long over {roofline.spare_tokens(eight, load(large)):.0f} "
    "tokens as over one"
)
assert plans["Llama 3.1 8B, 3.2 1B", 1].gamma > plans["Llama 3.1 8B, 3.2 1B", 512].gamma == 0

# %% [markdown]
# ## A mesh
#
# Latency comes from `model`: each device reads its own part of the weights. Throughput comes from
# `data`. So a model is split over as many devices as its heads allow, and what is left takes rows.
# Target and drafter must lie on the same mesh; a drafter whose heads do not divide is whole on
# every device, which costs little.


# %%
def mesh_for(config, count):
    """The target's heads over as many devices as divide both, rows over the others."""
    model = math.gcd(count, axes_of(config).parts["kv_heads"])
    return sharding.mesh(f"data={count // model},model={model}")


names = "debian-t5-large", "debian-t5-draft"
unsplit = [jaxspec.load(name) for name in names]
mesh = mesh_for(unsplit[0].config, jax.device_count())
target, draft = (jaxspec.load(name, mesh=mesh) for name in names)
print(dict(mesh.shape))


def on_first_device(model):
    leaves = jax.tree.leaves(model.params)
    return sum(x.addressable_shards[0].data.nbytes for x in leaves)


for alone, split in zip(unsplit, (target, draft), strict=True):
    part = on_first_device(split) / on_first_device(alone)
    whole = sharding.kept_whole(axes_of(split.config), mesh)
    print(f"{split.name}: {part:.1%} on each device; whole are {whole or 'norms only'}")
    assert np.isclose(part * mesh.shape["model"], 1, rtol=0.1) or whole

# %% [markdown] The text does not depend on where the parameters lie. In float32 it is the same
# token for token on one device and on all.

# %%
prompts = [
    f"translate English to German: {text}"
    for text in (
        "This package contains the API documentation for the library.",
        "This package provides the development files and the headers.",
        "A graphical tool to edit text files.",
        "This package contains the shared libraries.",
        "This is a dummy package. It can safely be removed.",
        "This package includes the command line tools.",
        "The library is open on Monday, but not on Sunday.",
        "This package contains debugging symbols.",
    )
]
settings = dict(max_new_tokens=32)
single = jaxspec.generate(unsplit[0], prompts, **settings)
plain = jaxspec.generate(target, prompts, **settings)
for text in plain.texts[:3]:
    print(text)

assert single.texts == plain.texts

# %% [markdown]
# ## A large pair from the hub
#
# Parameters go to the devices tensor by tensor, each device gets its part, and nobody ever holds
# the whole model. FLAN-T5 is T5 v1.1, tuned on instructions, and can translate.
# `"google/t5-v1_1-xxl"` loads the same way, and so do Llamas (`"meta-llama/Llama-3.1-8B"` with
# `"meta-llama/Llama-3.2-1B"`, once you have a token that may read them).
#
# This pair is a download of some 3.4 GB. Where there is no accelerator, no connection or no room,
# the cell says so, and the shipped pair takes its place in all that follows.

# %%
from jaxspec.weights.orbax import CheckpointError

LARGE = {"google/flan-t5-large": "flan-t5-large", "google/flan-t5-small": "flan-t5-small"}
DTYPE = "float32" if SIMULATED else "bfloat16"


def free_bytes():
    """What the fullest device has left; 0 where devices are simulated."""
    stats = [each.memory_stats() or {} for each in jax.local_devices()]
    return min(found.get("bytes_limit", 0) - found.get("bytes_in_use", 0) for found in stats)


def large_pair():
    """The pair on a mesh, in bfloat16, or why there is none."""
    shapes = [SHAPES[name] for name in LARGE.values()]
    mesh = mesh_for(shapes[0], jax.device_count())
    if SIMULATED:
        return "no accelerator: a CPU would take minutes for a sentence"
    wanted = sum(
        parameter_bytes(config, mesh) + cache_bytes(config, ROWS, TOKENS, mesh) for config in shapes
    )
    if wanted > 0.9 * free_bytes():
        return (
            f"it needs {wanted / GIB:.1f} GiB on each device, and {free_bytes() / GIB:.1f} are free"
        )
    try:
        return [jaxspec.load(name, dtype=DTYPE, mesh=mesh) for name in LARGE]
    except CheckpointError as error:
        return error.__cause__ or error


found = large_pair()
if isinstance(found, list):
    target, draft = found
else:
    print(f"skipped: {found}")
    target, draft = (jaxspec.load(name, dtype=DTYPE, mesh=mesh) for name in names)
mesh = sharding.mesh_of(target.params)
print(f"{target.name} with {draft.name} in {DTYPE} on {dict(mesh.shape)}")
print(jaxspec.generate(target, prompts[:1], **settings).texts[0])
assert target.config.dtype == draft.config.dtype == DTYPE

# %% [markdown]
# ## Warming up
#
# The first call of a kind compiles, which takes seconds for a small model and minutes for a large
# one. The same program then serves every prompt and limit of its buckets (lengths are rounded up),
# every temperature and every key. So warm up once with a prompt of each length that is expected,
# and at each batch size. A program that is on disk (`jax_compilation_cache_dir`, the first cell)
# need not be compiled at all: dropping what this process has, as a new process would begin, shows
# it.

# %%
programs, from_disk = [], []


def on_compiled(event, seconds, **about):
    if event.endswith("backend_compile_duration"):
        programs.append(seconds)


def on_event(event, **about):
    if event.endswith("cache_hits"):
        from_disk.append(event)


jax.monitoring.register_event_duration_secs_listener(on_compiled)
jax.monitoring.register_event_listener(on_event)


def timed(what, prompts, **more):
    """Seconds of a call, and how many programs it needed and found on disk."""
    before, start = (len(programs), len(from_disk)), time.perf_counter()
    jaxspec.generate(target, prompts, drafter=draft, gamma=GAMMA, **settings, **more)
    seconds, new = (
        time.perf_counter() - start,
        (len(programs) - before[0], len(from_disk) - before[1]),
    )
    print(f"{what:34}{seconds:8.3f} s, {new[0]} programs, {new[1]} of them from disk")
    return seconds, *new


timed("first call", prompts)
second, compiled, _ = timed("second call", prompts)
_, others, _ = timed("other prompts of the same lengths", prompts[::-1])
jax.clear_caches()
_, _, read = timed("as in a new process", prompts)

assert compiled == others == 0
assert read > 0

# %% [markdown]
# ## Programs that were compiled elsewhere
#
# A TPU's time need not go into compiling. Its compiler runs on any Linux machine, without a TPU and
# without weights:
#
# ```console
# $ pip install --no-deps --target ~/libtpu 'libtpu==0.0.42.*' && export PYTHONPATH=~/libtpu
# $ python -m benchmarks.estimates.compile --target flan-t5-large --draft flan-t5-small \
#     --gamma 4 --batch 8 --prompt 32 --max-new-tokens 32 \
#     --topology v5e:2x4 --mesh model=8 --save programs
# ```
#
# in a checkout of jaxspec keeps the program in a folder, and `aot.load` runs it where the chips
# are. A program of other versions, chips, shapes or options is refused. Here this machine compiles
# for its own devices.

# %%
import tempfile

from jaxspec.analysis import aot

prepared = jaxspec.prepare(target, prompts, drafter=draft, gamma=GAMMA, **settings)
with tempfile.TemporaryDirectory() as folder:
    compiled = aot.compile_generation(prepared, jax.devices(), mesh)
    aot.save({"speculative": compiled}, folder)
    start = time.perf_counter()
    run = aot.load(folder, prepared)
    print(
        f"compiled in {compiled.program.compile_seconds:.1f} s, loaded in "
        f"{time.perf_counter() - start:.1f} s"
    )
    stored = run(prepared)

generated = jaxspec.generate(target, prompts, drafter=draft, gamma=GAMMA, **settings)
assert np.array_equal(stored.length, generated.lengths)
for row, again, n in zip(stored.tokens, generated.tokens, generated.lengths, strict=True):
    assert np.array_equal(row[:n], again[:n])

# %% [markdown]
# ## Measuring
#
# α belongs to the pair and the task, c and v to the pair, the mesh and the batch. They are measured
# as in `when_does_it_pay.ipynb`; `jaxspec plan` and `jaxspec bench` do it on the command line,
# `bench` with random weights of any published shape, too. Eight simulated devices share a few
# cores, which have no arithmetic to spare: v is far above 1 there, and c and v tell nothing about a
# TPU.

# %%
from jaxspec.analysis import acceptance, formulas

prepared = prepare(target, prompts, drafter=draft, gamma=GAMMA, **settings)
alpha = acceptance.measure(prepared, batch=len(prompts))
costs = cost.measure(prepared, repeats=3 if SMOKE else 7, inner=3 if SMOKE else 20)
check = max(costs.v - 1, 0) / GAMMA  # of each draft token; v is taken to be linear
plan = planning.plan(min(alpha.alpha, 1.0), costs.c, 1 + check * np.arange(17), batch=costs.batch)

print(
    f"batch {costs.batch} on {dict(mesh.shape)}: a pass of the target takes {costs.target_ms:.2f} "
    "ms"
)
print(f"α = {alpha.alpha:.2f} ± {alpha.stderr:.2f}, c = {costs.c:.2f}, v({GAMMA}) = {costs.v:.2f}")
print(planning.sentence(plan))
assert 0 < alpha.alpha <= 1 and costs.c > 0

# %% [markdown] And whole generations, with draft tokens and without, interleaved; medians. The
# prediction is for one row. A batch goes on until its last row has ended, the one with the fewest
# draft tokens accepted, so that less is expected of it.

# %%
variants = [
    lambda d=d: jaxspec.generate(target, prompts, drafter=d, gamma=GAMMA, **settings)
    for d in (draft, None)
]
fast, plain = [variant() for variant in variants]
seconds = np.median(cost.interleave(variants, repeats=3 if SMOKE else 9), axis=1)
for name, out, time_of in zip(("speculative", "plain"), (fast, plain), seconds, strict=True):
    print(
        f"{name:12}{out.lengths.sum() / time_of:8.0f} tokens/s, {np.max(out.stats.rounds)} passes "
        "of the target"
    )
predicted = float(formulas.improvement(min(alpha.alpha, 1.0), GAMMA, costs.c, costs.v))
print(f"speed-up {seconds[1] / seconds[0]:.2f}, predicted {predicted:.2f}")

figure, axes = plt.subplots(figsize=(5, 2), layout="constrained")
speeds = [plain.lengths.sum() / seconds[1], fast.lengths.sum() / seconds[0]]
bars = axes.barh(["plain", "speculative"], speeds, color=["#777777", "#0072B2"])
axes.bar_label(bars, fmt=" %.0f")
axes.set(xlabel=f"tokens/s, batch {len(prompts)}", xlim=(0, 1.15 * max(speeds)))
plt.show()

assert np.max(fast.stats.rounds) < np.max(plain.stats.rounds)
if DTYPE == "float32":
    assert fast.texts == plain.texts == single.texts

# %% [markdown]
# ## What bfloat16 does to the text
#
# A pass over γ + 1 tokens rounds otherwise than γ + 1 passes over one. In float32 that changes
# nothing; in bfloat16 the two most probable tokens may change places where they are nearly equally
# probable. `numerics.mismatches` finds the first such place of each text, and how near a tie it
# was, in nats.

# %%
from jaxspec.analysis import numerics

halved = [
    jaxspec.load(name, dtype="bfloat16", mesh=mesh_for(unsplit[0].config, jax.device_count()))
    for name in names
]
apart = numerics.mismatches(prepare(halved[0], prompts, drafter=halved[1], gamma=GAMMA, **settings))
print(
    f"{len(prompts) - len(apart)} of {len(prompts)} texts are the same with draft tokens and "
    "without"
)
for found in apart:
    print(
        f"text {found.row} differs at token {found.position}, where {abs(found.margin):.3f} nats "
        "lie between both"
    )
assert all(abs(found.margin) < 0.25 for found in apart)

# %% [markdown]
# ## Several hosts
#
# A slice of more than 8 chips has several hosts, each of which runs the same program; then
# `jax.devices()` are those of all hosts, and a mesh spans them:
#
# ```python
# import jax
#
# jax.distributed.initialize()  # before anything else; on a TPU slice it finds the other hosts by
# itself
#
# import jaxspec
#
# target = jaxspec.load("google/t5-v1_1-xxl", dtype="bfloat16", mesh="data=2,model=8") draft =
# jaxspec.load("google/t5-v1_1-small", dtype="bfloat16", mesh="data=2,model=8") out =
# jaxspec.generate(target, prompts, drafter=draft, gamma=7)  # the same call, with the same prompts,
# on every host if jax.process_index() == 0:
#     print(out.texts)  # every host has the whole text
# ```
#
# `gcloud compute tpus tpu-vm ssh NAME --zone ZONE --worker all --command "python3 decode.py"`
# starts it on all of them. Each host reads the checkpoint, so it should lie on a disk that all of
# them see, or be downloaded by each. Stop strings are looked for by the host between rounds, and
# are for a single process.
#
# ## Where to go on
#
# * `when_does_it_pay.ipynb`: the map of α and γ, with sliders.
# * `bring_your_own_model.ipynb`: a network of your own. To split it over a mesh, place its
# parameters with `jax.device_put`.
