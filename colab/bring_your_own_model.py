# %% [markdown]
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxspec/jaxspec/blob/main/colab/bring_your_own_model.ipynb)
# [![Open In Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/jaxspec/jaxspec/blob/main/colab/bring_your_own_model.ipynb)

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
# # Bring your own model
#
# A target or a draft is anything that maps a row of tokens to logits: a Flax Linen module, an NNX
# module, an Equinox module, a plain function. Here are small models of text, byte by byte, trained
# in this notebook; then drafters for a model that has no smaller sibling; then an acceptance rule
# of our own, and the proof that it is exact.

# %%
import jax.numpy as jnp
import numpy as np
import optax

from jaxspec.files import corpus

# As in quickstart: texts are compared token by token.
jax.config.update("jax_default_matmul_precision", "highest")

VOCAB = 128  # ASCII
texts = [row["reference"] for row in corpus.heldout("edit")]
rows = [np.frombuffer(text.encode("ascii", "ignore"), np.uint8).astype(np.int32) for text in texts]
corpus = np.concatenate(rows)


def prompt_of(text):
    return jaxspec.Prompt(
        jnp.array([list(text.encode())], jnp.int32), jnp.array([len(text)], jnp.int32)
    )


def text_of(out):
    return bytes(out.tokens[0, : out.lengths[0]].tolist()).decode()


prompt = prompt_of("This package contains ")
print(f"{len(rows)} texts, {len(corpus)} bytes: {texts[0][:60]}...")

# %% [markdown]
# ## A Linen module as the target
#
# `__call__` takes tokens of shape [batch, step] and returns logits of shape [batch, step, vocab];
# position t may only look at tokens up to t. This network sees the last `window` bytes.

# %%
import flax.linen as nn

from jaxspec.nets import adapters


def last(x, window):
    """Each position's features, and those of the window - 1 positions before it: [..., step, window
    * dim].
    """
    shifted = [jnp.pad(x, ((0, 0), (back, 0), (0, 0)))[:, : x.shape[1]] for back in range(window)]
    return jnp.concatenate(shifted, axis=-1)


class Network(nn.Module):
    window: int
    width: int

    @nn.compact
    def __call__(self, tokens):
        x = last(nn.Embed(VOCAB, 16)(tokens), self.window)
        x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(VOCAB)(x)


network = Network(window=10, width=256)
params = network.init(jax.random.key(0), prompt.tokens)["params"]
target = jaxspec.Model(adapters.from_linen(network, VOCAB), params)

# %% [markdown] That is all that jaxspec needs: `jaxspec.Model(lm, params)`. Its text becomes worth
# reading when it has been trained, here on little text; this takes some seconds, and has nothing to
# do with jaxspec.


# %%
def train(apply, params, rate=3e-3, steps=100 if SMOKE else 500):
    """Adam on random pieces of the corpus; apply(params, tokens) -> logits."""
    optimizer = optax.adam(rate)

    def loss_of(params, tokens):
        logits = apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @jax.jit
    def step(params, state, tokens):
        loss, gradient = jax.value_and_grad(loss_of)(params, tokens)
        change, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, change), state, loss

    state, random = optimizer.init(params), np.random.default_rng(0)
    for _ in range(steps):
        first = random.integers(0, len(corpus) - 65, 32)
        params, state, loss = step(params, state, corpus[first[:, None] + np.arange(65)])
    print(f"trained to a loss of {loss:.2f} nats a byte")
    return params


target = target._replace(
    params=train(lambda p, tokens: network.apply({"params": p}, tokens), target.params)
)
plain = jaxspec.generate(target, prompt, max_new_tokens=64)
print("This package contains |", text_of(plain))

# %% [markdown]
# ## An NNX module as the draft
#
# A shorter window, and an eighth of the width. `from_nnx` splits the module into a pure function
# and parameters.

# %%
from flax import nnx


class Small(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, 8, rngs=rngs)
        self.hidden = nnx.Linear(4 * 8, 32, rngs=rngs)
        self.head = nnx.Linear(32, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        return self.head(nnx.relu(self.hidden(last(self.embed(tokens), 4))))


small = Small(nnx.Rngs(0))
lm, params = adapters.from_nnx(small, VOCAB)
graph, _ = nnx.split(small)
draft = jaxspec.Model(lm, train(lambda p, tokens: nnx.merge(graph, p)(tokens), params))


def speculate(drafter, target=target):
    """The text with a drafter, which must be the text without."""
    out = jaxspec.generate(target, prompt, drafter=drafter, gamma=4, max_new_tokens=64)
    accepted, drafted, rounds = (
        int(x.sum()) for x in (out.stats.accepted, out.stats.drafted, out.stats.rounds)
    )
    print(
        f"{rounds} target passes instead of {plain.stats.rounds[0]}; {accepted} of {drafted} draft "
        "tokens accepted"
    )
    assert text_of(out) == text_of(plain)
    return out


out = speculate(draft)
assert out.stats.tokens_per_round[0] > 1.2

# %% [markdown]
# ## A plain function as the draft
#
# One matrix, of what follows each byte. The function's parameters are any pytree.


# %%
def bigram(params, tokens):
    return params[tokens]


draft = jaxspec.Model(
    adapters.from_function(bigram, VOCAB), train(bigram, jnp.zeros((VOCAB, VOCAB)), rate=0.1)
)
out = speculate(draft)

# %% [markdown]
# ## An Equinox module as the draft
#
# An Equinox module is itself a pytree, so that the plain function is one that calls it.

# %%
try:
    import equinox as eqx
except ImportError:
    print("skipped: equinox is not installed")
else:

    class Tiny(eqx.Module):
        embed: jax.Array
        head: eqx.nn.Linear

        def __init__(self, key):
            a, b = jax.random.split(key)
            self.embed, self.head = (
                jax.random.normal(a, (VOCAB, 8)),
                eqx.nn.Linear(16, VOCAB, key=b),
            )

        def __call__(self, tokens):
            return jax.vmap(jax.vmap(self.head))(last(self.embed[tokens], 2))

    weights, rest = eqx.partition(Tiny(jax.random.key(0)), eqx.is_array)

    def tiny(weights, tokens):
        return eqx.combine(weights, rest)(tokens)

    speculate(jaxspec.Model(adapters.from_function(tiny, VOCAB), train(tiny, weights)))

# %% [markdown]
# ## A cache of your own
#
# The functions above read the whole row in every pass. A function with a cache reads the new tokens
# only. It takes `(params, cache, tokens, positions)`, writes entry `positions[b, t]` of row b,
# looks at entries up to that one, and returns the logits and the cache. Every array in the cache
# has the batch as its first axis. Rewinding is done by jaxspec: what lies after a row's end is
# garbage, to be written over.
#
# Here the cache holds embeddings, and each position takes the last `window` of them.


# %%
def cached(params, cache, tokens, positions):
    embedded = params["Embed_0"]["embedding"][tokens]
    cache = cache.at[jnp.arange(tokens.shape[0])[:, None], positions].set(embedded)
    back = positions[..., None] - jnp.arange(network.window)  # batch, step, window
    seen = jnp.take_along_axis(cache[:, None], jnp.maximum(back, 0)[..., None], axis=2)
    x = jnp.where(back[..., None] >= 0, seen, 0.0).reshape(*tokens.shape, -1)
    first, second = params["Dense_0"], params["Dense_1"]
    x = jax.nn.relu(x @ first["kernel"] + first["bias"])
    return x @ second["kernel"] + second["bias"], cache


def empty_cache(batch, capacity):
    return jnp.zeros((batch, capacity, 16))


quick = jaxspec.Model(adapters.from_function(cached, VOCAB, empty_cache=empty_cache), target.params)
out = speculate(draft, target=quick)

# %% [markdown]
# ## No smaller sibling
#
# Counts of n-grams are a language model, too: `drafters.ngram` counts them in texts, in an instant.
# `drafters.prompt_lookup` copies from the row itself, and needs nothing.

# %%
out = speculate(jaxspec.drafters.ngram(rows, target, order=5))
assert out.stats.tokens_per_round[0] > 1.2
out = speculate(jaxspec.drafters.prompt_lookup(longest=4, shortest=2))

# %% [markdown]
# ## A rule of your own
#
# A rule gets the draft and the target's distributions, and returns how many draft tokens are
# accepted and which token follows them. Here is one that accepts a draft token x with probability
# min(1, p(x) / q(x)), and, after a rejection, draws from what p has more than q. Random numbers
# come from `jaxspec.core.noise`, through `uniforms` and `sample_residual`, so that they are never
# used twice.

# %%
from jaxspec.core import Rule
from jaxspec.rules import common


def verify(keys, position, draft, target, replace=common.residual):
    p = common.gather_probs(target.log_probs[:, :-1], draft.tokens)
    q = common.draft_probs(draft)
    count = common.count_accepted(common.uniforms(keys, position, draft) * q < p, draft.length)
    # at the first rejection, or after the last one
    p_next = jnp.exp(common.take_position(target.log_probs, count))
    q_next = common.draft_distribution_at(draft, count, p_next.shape[-1])  # 0 after the last one
    left = jnp.log(replace(p_next, q_next))
    return common.chain_verdict(draft, count, common.sample_residual(keys, position, left))


def verify_wrongly(keys, position, draft, target):
    """After a rejection, draws from p again, as if nothing had been rejected."""
    return verify(keys, position, draft, target, replace=lambda p, q: p)


mine = Rule(verify, "mine", exact=True)
wrong = Rule(verify_wrongly, "wrong", exact=False)

key = jax.random.key(0)
for rule in (mine, wrong):
    sampled = jaxspec.generate(
        target,
        prompt,
        drafter=draft,
        gamma=4,
        rule=rule,
        temperature=0.8,
        key=key,
        max_new_tokens=48,
    )
    print(f"{rule.name:6} {text_of(sampled)!r}")

# %% [markdown] The texts do not show which is wrong. `certify` does not look at texts: it runs the
# decoder on a tiny model of three tokens, enumerates everything that can be drawn, and adds up the
# probability of each text. The result is the total variation from the target's distribution: the
# most by which the probability of any event is off. Rounding gives some 1e-7.

# %%
from jaxspec.testing import certify, table_model

tables = table_model(jax.random.key(1), vocab=3), table_model(jax.random.key(2), vocab=3)


def error_of(rule):
    found = certify(tables[0], drafter=tables[1], rule=rule, gamma=2, steps=3)
    print(f"{rule.name:10} off by {found:.1e}")
    return found


assert error_of(jaxspec.rules.rejection()) < 1e-6
assert error_of(mine) < 1e-6
assert error_of(wrong) > 1e-2

# %% [markdown] The same holds for a model: give `certify` one with three tokens, and it proves that
# its cache survives being rewound.


# %%
def tiny_weights(key):
    """Random parameters for `cached`, with three tokens and large enough to matter."""
    a, b, c = jax.random.split(key, 3)
    draw = jax.random.normal
    return {
        "Embed_0": {"embedding": draw(a, (3, 16))},
        "Dense_0": {"kernel": 0.1 * draw(b, (network.window * 16, 8)), "bias": jnp.zeros(8)},
        "Dense_1": {"kernel": draw(c, (8, 3)), "bias": jnp.zeros(3)},
    }


lm = adapters.from_function(cached, 3, empty_cache=empty_cache)
models = [jaxspec.Model(lm, tiny_weights(jax.random.key(seed))) for seed in (3, 4)]
found = certify(models[0], drafter=models[1], rule=mine, gamma=2, steps=3)
print(f"our model, our cache, our rule: off by {found:.1e}")
assert found < 1e-6
