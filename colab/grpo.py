# %% [markdown]
# [![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/github/jaxspec/jaxspec/blob/main/colab/grpo.ipynb)
# [![Open In Kaggle](https://kaggle.com/static/images/open-in-kaggle.svg)](https://kaggle.com/kernels/welcome?src=https://github.com/jaxspec/jaxspec/blob/main/colab/grpo.ipynb)

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
# # Reinforcement learning with speculative rollouts
#
# GRPO spends most of its time on rollouts: it samples several answers of each prompt from the policy.
# Speculative decoding makes them cheaper and leaves their distribution exactly the policy's. So the
# drafter may be anything, and may fall behind the policy: only the speed depends on it.
#
# The cells with titles are [`docs/grpo.py`](https://github.com/jaxspec/jaxspec/blob/main/docs/grpo.py).

# %%
# @title docs/grpo.py, part 0: imports
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxspec
from jaxspec.decode import teacher_forcing

# %% [markdown]
# The policy is a small GPT that continues package descriptions. A program checks its answers: it asks
# for a sentence of eight words.

# %%
# @title docs/grpo.py, part 1: a reward that a program can verify
WORDS = 8


def reward(text: str) -> float:
    """Asks for a sentence of eight words: 1 for a full stop after the eighth, 0 for none at all."""
    sentence, stop, _ = text.partition(".")
    words = len(sentence.split())
    return max(0.0, 1 - abs(words - WORDS) / WORDS) if stop else 0.0


# %%
assert reward("one two three four five six seven eight.") == 1.0
assert reward("a sentence without an end") == 0.0


# %%
# @title docs/grpo.py, part 2: rollouts
def rollouts(policy, prompts, drafter, key, samples=8, new_tokens=32):
    """Samples answers; rows 0 to samples - 1 are the first prompt's, the next ones the second's."""
    return jaxspec.generate(
        policy,
        prompts,
        drafter=drafter,
        gamma=4,
        temperature=1.0,
        num_samples=samples,
        max_new_tokens=new_tokens,
        log_probs=True,
        key=key,
    )


# %% [markdown]
# `log_probs=True` reports the policy's log probability of every sampled token. The loss needs them,
# and verification has computed them already.


# %%
# @title docs/grpo.py, part 3: the loss
def advantages(rewards, samples):
    """How far each answer [answer] is above the mean of its prompt's answers, in standard
    deviations; the rewards are in the order of `rollouts`.
    """
    groups = np.reshape(rewards, (-1, samples))
    centred = groups - groups.mean(axis=1, keepdims=True)
    return (centred / (groups.std(axis=1, keepdims=True) + 1e-4)).reshape(-1)


def loss(params, lm, prompt, tokens, lengths, old, gains):
    """Clipped policy gradient. tokens, old [answer, place]: the answers, and their log probabilities
    when they were drawn; gains [answer]: their advantages.
    """

    def read(_, logits, tokens):
        log_probs = jax.nn.log_softmax(logits)
        return None, jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]

    new = teacher_forcing.at_new_tokens(lm, params, prompt, tokens, read, beside=(tokens,))
    ratio = jnp.exp(new - old)
    gain = gains[:, None]
    objective = jnp.minimum(ratio * gain, jnp.clip(ratio, 0.8, 1.2) * gain)
    is_text = jnp.arange(tokens.shape[1])[None, :] < lengths[:, None]
    return -jnp.sum(jnp.where(is_text, objective, 0.0)) / jnp.sum(is_text)


# %%
# @title docs/grpo.py, part 4: a step
@functools.partial(jax.jit, static_argnames=("lm", "optimizer"))
def update(lm, optimizer, params, state, *batch):
    """Follows the gradient of one batch of answers."""
    gradients = jax.grad(loss)(params, lm, *batch)
    changes, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, changes), state


def learn(policy, optimizer, state, prompts, out, samples):
    """Rewards answers and moves the policy; returns it, the optimizer's state and the mean reward."""
    rewards = np.array([reward(text) for text in out.texts])
    gains = jnp.asarray(advantages(rewards, samples), jnp.float32)
    batch = (prompts, out.tokens, out.lengths, out.log_probs.raw, gains)
    params, state = update(policy.lm, optimizer, policy.params, state, *map(on_device, batch))
    return policy._replace(params=params), state, rewards.mean()


def on_device(x):
    """Puts arrays of NumPy on the device; the program is the same for both."""
    return jax.tree.map(jnp.asarray, x)


# %% [markdown]
# ## Training
#
# The same policy answers the same prompts three times at each step: plainly, with a draft model that
# stays as it is, and with the same draft model when it learns from the answers. The policy then
# learns from the plain answers.

# %%
import time

from jaxspec.files import corpus
from jaxspec.training import online

STEPS, SAMPLES, NEW = (3, 4, 12) if SMOKE else (24, 8, 24)
policy, draft = jaxspec.load("debian-gpt-base"), jaxspec.load("debian-gpt-small")
ids = policy.tokenizer([row["input"] for row in corpus.heldout("text")])["input_ids"]
rows = np.array([row[:6] for row in ids if len(row) >= 6][:8])
prompts = [jaxspec.Prompt(jnp.array(part), jnp.array([6, 6])) for part in np.split(rows, 4)]

optimizer = optax.adam(3e-4)
state = optimizer.init(policy.params)
learner = online(draft, optimizer=optax.adam(1e-3), max_prompt=6, max_new_tokens=NEW, steps=2)
learnt = learner.init()

rewards, tokens_a_round, seconds = [], [], []
for step in range(STEPS):
    prompt = prompts[step % len(prompts)]
    drafts = {"plain": None, "frozen": draft, "learns": learner.drafter(learnt)}
    answers, took = {}, {}
    for number, (way, drafter) in enumerate(drafts.items()):
        key = jax.random.fold_in(jax.random.key(step), number)
        began = time.perf_counter()
        answers[way] = rollouts(policy, prompt, drafter, key, SAMPLES, NEW)
        took[way] = time.perf_counter() - began
    learnt, _ = learner.update(learnt, policy, prompt, answers["learns"])
    policy, state, mean = learn(policy, optimizer, state, prompt, answers["plain"], SAMPLES)
    rewards.append(mean)
    tokens_a_round.append(
        # the first token of each row is prefill's
        {
            way: (out.stats.emitted - 1).sum() / out.stats.rounds.sum()
            for way, out in answers.items()
        }
    )
    seconds.append(took)
print(f"mean reward: {np.mean(rewards[:4]):.2f} at first, {np.mean(rewards[-4:]):.2f} at last")
assert SMOKE or np.mean(rewards[-4:]) > np.mean(rewards[:4])
assert policy.lm == jaxspec.load("debian-gpt-base").lm  # the same program at every step

# %%
# @title Rewards, and tokens a round as the policy moves
import matplotlib.pyplot as plt

figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
left.plot(rewards, color="black")
left.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
for way, colour in (("frozen", "tab:blue"), ("learns", "tab:orange")):
    right.plot([row[way] for row in tokens_a_round], color=colour, label=f"draft model, {way}")
right.axhline(1, color="black", linewidth=0.8, linestyle=":", label="plain decoding")
right.set(xlabel="step", ylabel="tokens a round")
right.legend(frameon=False)
plt.show()
assert all(row["frozen"] > 1 for row in tokens_a_round)

# %%
plain = np.array([row["plain"] for row in seconds[1:]])  # the first step compiles
for way in ("frozen", "learns"):
    ratios = plain / np.array([row[way] for row in seconds[1:]])
    low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
    print(f"rollouts, {way}: {middle:.2f} times as fast as plain ({low:.2f} to {high:.2f})")

# %% [markdown]
# On a CPU a batch of rows leaves no spare compute, and this policy is tiny: speculation may lose here,
# though each round has more than two tokens. On an accelerator a pass over a few tokens of each row
# costs about as much as one token of each.
# `python -m benchmarks.grpo` measures steps an hour with four ways of drafting. For Tunix's trainers,
# see [`JaxspecRollout`](https://github.com/jaxspec/jaxspec/blob/main/docs/other_networks.md).
