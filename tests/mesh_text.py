"""Run by `test_shipped.py` with 8 devices: coupled text of 16 rows on one device and split over all, as JSON."""

import json

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxspec
from jaxspec import accept, noise
from jaxspec.cli.prompts import heldout_for
from jaxspec.decode import loop, request

ROWS, NEW = 16, 16


def said(outcome):
    return [row[:n].tolist() for row, n in zip(np.asarray(outcome.tokens), np.asarray(outcome.length), strict=True)]


def main():
    target, draft = (jaxspec.load(f"debian-t5-{size}") for size in ("base", "small"))
    prompt = request.encode(target, heldout_for(target, ROWS))
    options = dict(temperature=1.0, max_new_tokens=NEW, key=noise.row_keys(jax.random.key(11), ROWS))
    whole = request.prepare(target, prompt, drafter=draft, gamma=4, accept=accept.coupled(), **options)
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    rows, everywhere = (NamedSharding(mesh, PartitionSpec(*names)) for names in (("rows",), ()))
    asked = whole.request._replace(eos=jax.device_put(whole.request.eos, everywhere))
    by_row = jax.device_put((whole.keys, whole.prompt, asked.controls, asked.limit), rows)
    keys, prompt, controls, limit = by_row
    split = whole._replace(
        keys=keys,
        prompt=prompt,
        weights=jax.device_put(whole.weights, everywhere),
        request=asked._replace(controls=controls, limit=limit),
    )
    outcome = loop.run(*split)
    report = {
        "devices": jax.device_count(),
        "shards": [shard.data.shape[0] for shard in prompt.tokens.addressable_shards],
        "split": said(outcome),
        "whole": said(loop.run(*whole)),
        "plain": said(loop.run(*request.prepare(target, whole.prompt, **options))),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
