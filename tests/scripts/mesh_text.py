"""Coupled text of 16 rows split over 8 devices, and plain text on one, as JSON; `tests/test_shipped.py` runs it."""

import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxspec
from jaxspec import drafters, rules
from jaxspec.cli.prompts import heldout_for
from jaxspec.core import noise
from jaxspec.decode import loop, request

ROWS, NEW = 16, 16


def texts(outcome):
    return [row[:n].tolist() for row, n in zip(np.asarray(outcome.tokens), np.asarray(outcome.length), strict=True)]


def split(prepared, mesh):
    """The same generation with its rows over the mesh."""
    rows, everywhere = (NamedSharding(mesh, PartitionSpec(*names)) for names in (("rows",), ()))
    prompt, request = jax.device_put((prepared.prompt, prepared.request), rows)
    return prepared._replace(prompt=prompt, weights=jax.device_put(prepared.weights, everywhere), request=request)


def main(target, draft):
    target, draft = jaxspec.load(target), jaxspec.load(draft)
    prompt = request.encode(target, heldout_for(target, ROWS))
    options = dict(temperature=1.0, max_new_tokens=NEW, key=noise.row_keys(jax.random.key(11), ROWS))
    plain = texts(loop.run(request.prepare(target, prompt, **options)))
    options |= dict(drafter=drafters.tree(draft, (2, 1)))
    unsplit = request.prepare(target, prompt, rule=rules.coupled(), **options)
    prepared = split(unsplit, Mesh(np.array(jax.devices()), ("rows",)))
    shards = [shard.data.shape[0] for shard in prepared.prompt.tokens.addressable_shards]
    print(json.dumps(dict(devices=jax.device_count(), shards=shards, plain=plain, split=texts(loop.run(prepared)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
