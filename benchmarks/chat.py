"""Time to the first token of each turn of a chat, with caches that are kept and without.

    python -m benchmarks.chat --target gemma-3-270m.gguf

Any machine; five minutes on two cores of a CPU.

Both sides hold the same conversation, greedily: `jaxspec.chat`, which reads what is new, and
`jaxspec.stream` on all messages. Each turn is timed on both, one after the other, in conversations
after a first one, in which all programs are compiled. Printed are the tokens of each turn's prompt,
how many of them were kept, and the medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

import jaxspec

TEMPLATE = (  # of Gemma; for a model that has none
    "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else "
    "m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MESSAGES = (
    "I have two days in Lisbon at the end of October, and I would like to walk a lot. What should "
    "I see on the first?",
    "That sounds good. I do not like museums much, but I like old trams, viewpoints and "
    "pastries. Please plan the day again with that in mind, and say roughly how long each part "
    "takes.",
    "And the second day? I could take a train somewhere, if it is less than an hour away.",
    "How do I get from the airport to the centre in the evening, and do I need cash?",
    "Thank you. Please sum up both days in five lines.",
)


def timed(pieces: Iterator[Any]) -> tuple[list[int], float]:
    """Returns the tokens of an answer, and the seconds to the first of them."""
    start = time.perf_counter()
    tokens = list(next(pieces).tokens)
    first = time.perf_counter() - start
    return tokens + [token for piece in pieces for token in piece.tokens], first


def conversation(target: Any, **options: Any) -> list[dict[str, Any]]:
    """Holds the conversation once, each turn on both sides; returns what each turn took."""
    talk, turns = jaxspec.chat(target, **options), []
    for content in MESSAGES:
        start = time.perf_counter()
        messages = [*talk.messages, {"role": "user", "content": content}]
        whole, fresh = timed(jaxspec.stream(target, messages, **options))
        fresh_total = time.perf_counter() - start
        start = time.perf_counter()
        tokens, kept = timed(talk.send(content))
        total = time.perf_counter() - start
        counts = dict(prompt=talk.prompt_tokens, reused=talk.reused_tokens, same=tokens == whole)
        turns.append(counts | dict(fresh=fresh, kept=kept, fresh_total=fresh_total, total=total))
    return turns


def main(arguments: list[str] | None = None) -> None:
    """Prints a table with a line for each turn."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="a folder, a hub id or a .gguf file")
    parser.add_argument("--draft", help="a model that drafts; by default prompt lookup")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="timed conversations")
    options = parser.parse_args(arguments)
    target = jaxspec.load(options.target)
    drafter = jaxspec.load(options.draft) if options.draft else jaxspec.drafters.prompt_lookup()
    if target.tokenizer.chat_template is None:
        target.tokenizer.chat_template = TEMPLATE
    given = dict(drafter=drafter, gamma=3, max_new_tokens=options.max_new_tokens)
    rounds = [conversation(target, **given) for _ in range(1 + options.repeats)][1:]
    table = Table(
        "turn",
        "prompt tokens",
        "kept",
        "first token, all read",
        "first token, kept",
        "ratio",
        "whole turn",
    )
    for number, turns in enumerate(zip(*rounds, strict=True), 1):
        medians = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
        spread = [
            f"{min(t[name] for t in turns):.2f} to {max(t[name] for t in turns):.2f}"
            for name in ("fresh", "kept")
        ]
        cells = [
            f"{medians[name]:.2f} s ({of})"
            for name, of in zip(("fresh", "kept"), spread, strict=True)
        ]
        ratio = f"{medians['fresh'] / medians['kept']:.1f}"
        whole = f"{medians['fresh_total']:.2f} s, {medians['total']:.2f} s"
        table.add_row(
            str(number), str(turns[0]["prompt"]), str(turns[0]["reused"]), *cells, ratio, whole
        )
    console = Console(highlight=False, width=160)
    console.print(table)
    console.print(
        f"same tokens on both sides: {all(turn['same'] for turns in rounds for turn in turns)}"
    )


if __name__ == "__main__":
    main()
