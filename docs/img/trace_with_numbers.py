"""Draws docs/img/trace-with-numbers.png: some rounds of the shipped GPT pair, with the numbers of each draft token.

    python docs/img/trace_with_numbers.py

It needs the extra "browser" and a Chromium on the PATH, which takes the picture of the HTML that a notebook shows.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
from playwright import sync_api

import jaxspec
from jaxspec import trace

PROMPT = "This package contains the"
WIDTH = 900  # pixels


def markup() -> str:
    """Generates, and returns the trace as a complete document."""
    target, draft = jaxspec.load("debian-gpt-base"), jaxspec.load("debian-gpt-small")
    out = jaxspec.generate(
        target,
        PROMPT,
        drafter=draft,
        gamma=3,
        max_new_tokens=12,
        temperature=0.7,
        key=jax.random.key(7),
        trace_numbers=True,
    )
    rounds = trace.of_row(out.tokens[0, : out.lengths[0]], out.trace, 0)
    return trace.page(rounds, target.tokenizer)


def draw(path: Path) -> None:
    """Takes the picture of the document."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        page = browser.new_page(viewport={"width": WIDTH, "height": 400}, device_scale_factor=1.5)
        page.set_content(markup())
        page.locator("body > div").screenshot(path=path)
        browser.close()


if __name__ == "__main__":
    draw(Path(__file__).with_name("trace-with-numbers.png"))
