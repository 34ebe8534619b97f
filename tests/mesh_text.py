"""Run by `test_shipped.py` with 8 devices: coupled text of 16 rows split over all, and plain text on one, as JSON."""

import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxspec
from jaxspec import accept, drafters, noise
from jaxspec.cli.prompts import heldout_for
from jaxspec.decode import loop, request

ROWS, NEW = 16, 16


def said(outcome):
    return [row[:n].tolist() for row, n in zip(np.asarray(outcome.tokens), np.asarray(outcome.length), strict=True)]


def split(job, mesh):
    """The same job with its rows over the mesh."""
    rows, everywhere = (NamedSharding(mesh, PartitionSpec(*names)) for names in (("rows",), ()))
    asked = job.request._replace(eos=jax.device_put(job.request.eos, everywhere))
    by_row = jax.device_put((job.keys, job.prompt, asked.controls, asked.limit), rows)
    keys, prompt, controls, limit = by_row
    asked = asked._replace(controls=controls, limit=limit)
    return job._replace(keys=keys, prompt=prompt, weights=jax.device_put(job.weights, everywhere), request=asked)


def main(target, draft):
    target, draft = jaxspec.load(target), jaxspec.load(draft)
    prompt = request.encode(target, heldout_for(target, ROWS))
    options = dict(temperature=1.0, max_new_tokens=NEW, key=noise.row_keys(jax.random.key(11), ROWS))
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    report = {
        "devices": jax.device_count(),
        "plain": said(loop.run(*request.prepare(target, prompt, **options))),
        "split": {},
    }
    for gamma in (1, 4, 7):
        for name, drafter in (("good", draft), ("random", drafters.random())):
            whole = request.prepare(target, prompt, drafter=drafter, gamma=gamma, accept=accept.coupled(), **options)
            job = split(whole, mesh)
            report["shards"] = [shard.data.shape[0] for shard in job.prompt.tokens.addressable_shards]
            report["split"][f"{gamma}, {name}"] = said(loop.run(*job))
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
