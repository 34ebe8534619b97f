"""Models placed on devices that are simulated before jax starts, as JSON; `tests/test_sharding.py`
runs it.

python placement.py meshes FOLDER               with 8 devices: pairs on one device and on a 2 x 4 mesh; restores
python placement.py explicit                    with 8 devices: a mesh with Explicit axes, with jax.set_mesh and without
python placement.py process PORT INDEX FOLDER   one of two processes with 2 devices each; meshes over all 4; saves
"""

import json
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxspec
from jaxspec import drafters, rules, sharding, training
from jaxspec.core import Model, Prompt, noise
from jaxspec.decode import loop, request
from jaxspec.decode.generate import complete
from jaxspec.nets import axes_of, decoder, on_cpu, t5, whisper
from jaxspec.weights import hf_families, huggingface, orbax, quantisation
from jaxspec.weights.loading import find

ROWS, GAMMA, NEW = 4, 2, 32
TEMPERATURE = np.array([0.0, 0.0, 1.0, 1.0], np.float32)  # greedy and sampled rows in one program
LLAMA = decoder.decoder_config(96, dim=32, ff_dim=64, layers=1, heads=8, kv_heads=4, head_dim=8)
NETS = {  # random ones, which compile sooner
    "llama": (decoder, LLAMA),
    "gpt": (
        decoder,
        decoder.gpt_config(96, dim=32, ff_dim=64, layers=1, heads=8, max_positions=128),
    ),
    "encoder": (
        t5,
        t5.T5Config(96, dim=32, ff_dim=64, heads=8, head_dim=8, encoder_layers=1, decoder_layers=1),
    ),
    "speech": (
        whisper,
        whisper.WhisperConfig(
            96, 32, 64, 8, 1, 1, mels=4, source_positions=6, max_positions=64, start_token=1
        ),
    ),
}
SPLIT = ("encoder", "llama", "gpt", "int8", "speech")
SIZE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "head_dim": 8,
}
SIZE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
LOCAL, GLOBAL, DELTA = "sliding_attention", "full_attention", "linear_attention"
# what differs from SIZE: a network of each kind of layer and of norms that a mesh may cut
FAMILIES = {
    "gemma4_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": [LOCAL, GLOBAL] * 2,
    }
    | {
        "num_key_value_heads": 1,
        "use_double_wide_mlp": True,
        "global_head_dim": 16,
        "sliding_window": 8,
    }
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96},
    "qwen3_5_text": {
        "num_hidden_layers": 2,
        "layer_types": [DELTA, GLOBAL],
        "linear_num_key_heads": 2,
    }
    | {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
    },
    "olmo2": {},  # norms of all queries, and of all keys
    "cohere": {"use_qk_norm": True, "logit_scale": 1.0},  # layer norms, and norms of each head
}
TOKENS = np.random.default_rng(0).integers(0, LLAMA.vocab_size, (ROWS, 7)).astype(np.int32)


def random(kind, mesh=None, dtype="float32", seed=0):
    """A random model, and the same on a mesh."""
    net, config = NETS[kind]
    # texts that vary
    params = jax.tree.map(lambda x: 2 * x, net.init(config, jax.random.key(seed)))
    params = quantisation.quantise(params, dtype)
    if mesh is not None:
        params = jax.tree.map(
            sharding.put, params, sharding.parameters(params, axes_of(config), mesh)
        )
    return Model(net.language_model(config), params, None, config, kind)


def pair(kind, mesh=None):
    if kind == "int8":
        return random("llama", mesh, "int8"), drafters.prompt_lookup()
    return random(kind, mesh), random(kind, mesh, seed=1)


PROMPTS = Prompt(TOKENS, np.array([7, 3, 5, 1], np.int32))
# [rows, mels, frames]
SOUND = np.random.default_rng(1).normal(size=(ROWS, 4, 12)).astype(np.float32)


def prompts(kind):
    return PROMPTS._replace(encoder=SOUND) if kind == "speech" else PROMPTS


def of_families(mesh):
    """Texts of each family: plain on one device, and plain and drafted on the mesh."""
    texts = {}
    for kind, keys in FAMILIES.items():
        table = SIZE | keys | {"model_type": kind}
        NETS[kind] = decoder, hf_families.of(table).read(table)
        model = random(kind)
        places = sharding.parameters(model.params, axes_of(model.config), mesh)
        placed = model._replace(params=jax.tree.map(sharding.put, model.params, places))
        texts[kind] = [
            jaxspec.generate(
                target, PROMPTS, **options(drafter) | {"max_new_tokens": 16}
            ).tokens.tolist()
            for target, drafter in (
                (model, None),
                (placed, None),
                (placed, drafters.prompt_lookup()),
            )
        ]
    return texts


def options(drafter):
    keys = noise.row_keys(jax.random.key(11), ROWS)
    rule = rules.coupled()
    return dict(
        drafter=drafter,
        gamma=GAMMA,
        rule=rule,
        temperature=TEMPERATURE,
        max_new_tokens=NEW,
        key=keys,
    )


def text(kind, mesh=None):
    target, draft = pair(kind, mesh)
    out = jaxspec.generate(target, prompts(kind), **options(draft))
    return [row[:n].tolist() for row, n in zip(out.tokens, out.lengths, strict=True)]


def rows_over_all_devices():
    """Coupled text from trees, of 16 rows that a caller has put on a mesh of its own, and plain
    text on one device.
    """
    target, draft = pair("llama")
    prompt = Prompt(np.tile(TOKENS, (4, 1)), np.resize(PROMPTS.length, 16))
    settings = dict(temperature=1.0, max_new_tokens=16, key=noise.row_keys(jax.random.key(11), 16))
    plain = jaxspec.generate(target, prompt, **settings)
    settings |= dict(drafter=drafters.tree(draft, (2, 1)), rule=rules.coupled())
    prepared, mesh = (
        request.prepare(target, prompt, **settings),
        Mesh(np.array(jax.devices()), ("rows",)),
    )
    over_rows, everywhere = (
        NamedSharding(mesh, PartitionSpec(*names)) for names in (("rows",), ())
    )
    placed, arrays = jax.device_put((prepared.prompt, prepared.request), over_rows)
    weights = jax.device_put(prepared.weights, everywhere)
    out = complete(prepared._replace(prompt=placed, weights=weights, request=arrays))
    shards = [shard.data.shape[0] for shard in placed.tokens.addressable_shards]
    return dict(shards=shards, split=out.tokens.tolist(), plain=plain.tokens.tolist())


def compiled(kind, mesh):
    """The text of a generation on the mesh, its program, and the entries in its smallest part of a
    matrix.
    """
    target, draft = pair(kind, mesh)
    prepared = request.prepare(target, prompts(kind), **options(draft))
    arrays = prepared.weights, prepared.prompt, prepared.request
    program = loop.generation.lower(prepared.decoder, *arrays, prepared.max_new_tokens).compile()
    outcome = program(
        **dict(zip(("weights", "prompt", "request"), arrays, strict=True)), before=None
    )
    tokens, length = np.asarray(outcome.tokens), np.asarray(outcome.length)
    parts = [
        x.addressable_shards[0].data.size for x in jax.tree.leaves(prepared.weights) if _split(x)
    ]
    return (
        [row[:n].tolist() for row, n in zip(tokens, length, strict=True)],
        program.as_text(),
        min(parts),
    )


def _split(x):
    return x.ndim == 2 and x.addressable_shards[0].data.size < x.size


def gathered(hlo):
    """The number of entries of what each operation of a program that moves parts between devices
    takes from one.
    """
    shape = re.compile(r"(%?[\w.-]+) = \w+\[([\d,]*)\]")
    size = {
        name.lstrip("%"): int(np.prod([int(n) for n in dims.split(",") if n]))
        for name, dims in shape.findall(hlo)
    }
    operands = re.findall(
        r" (?:all-gather|all-to-all|collective-permute)(?:-start)?\(([^)]*)\)", hlo
    )
    return [
        size[operand.split()[-1].lstrip("%")]
        for group in operands
        for operand in re.split(r", (?=%)", group)
    ]


def cache_is_placed(kind, mesh):
    """Return whether keys and values, an encoder's too, lie where `sharding.cache` says; the
    compiler was not told.
    """
    target, draft = pair(kind, mesh)
    prepared = request.prepare(target, PROMPTS, **options(draft))
    cache = loop.start(
        prepared.decoder,
        prepared.weights,
        prepared.prompt,
        prepared.request,
        prepared.max_new_tokens,
    ).caches.target
    wanted = sharding.cache(cache, axes_of(target.config), mesh)
    pairs = zip(jax.tree.leaves(cache), jax.tree.leaves(wanted), strict=True)
    return all(x.sharding.is_equivalent_to(place, x.ndim) for x, place in pairs if x.ndim == 4)


def restored(folder, mesh):
    """Saved from one mesh, read to another: the places of the leaves, and whether they are the same
    bits.
    """
    model, other = random("llama", mesh), sharding.mesh("model=8")
    saved(folder, model)
    read = {
        "orbax": (orbax.restore(folder / "orbax", mesh=other)[0], model.params),
        "int8": (orbax.restore(folder / "int8", mesh=other)[0], orbax.restore(folder / "int8")[0]),
        "huggingface": (huggingface.restore(folder / "huggingface", mesh=other)[0], model.params),
    }

    def same(got, expected, place):
        return got.sharding == place and (np.asarray(got) == np.asarray(expected)).all()

    places = sharding.parameters(model.params, axes_of(LLAMA), other)
    return {
        how: all(jax.tree.leaves(jax.tree.map(same, *pair_of_params, places)))
        for how, pair_of_params in read.items()
    }


def saved(folder, model):
    """Saves a Llama in three ways."""
    manifest = dict(name="llama", description={})
    for name, dtype in (("orbax", "float32"), ("int8", "int8")):
        orbax.save(
            folder / name, model.params, LLAMA, find("debian-t5-base"), dtype=dtype, **manifest
        )
    huggingface.save(model, folder / "huggingface")


def left_on_the_host(folder, mesh):
    """Count parameters with a copy on the host: after saving, after copying them there, and those
    that may have one.
    """
    model = random("llama", mesh)
    leaves = jax.tree.leaves(model.params)
    saved(folder, model)
    after = sum(x._npy_value is not None for x in leaves)
    jax.tree.map(np.asarray, leaves)
    split = sum(not x.is_fully_replicated for x in leaves)
    return [after, sum(x._npy_value is not None for x in leaves), split]


def stored_in_parts(folder, mesh):
    """Return whether a checkpoint saved from a mesh is stored in the parts that its devices
    have.
    """
    with ocp.PyTreeCheckpointer() as checkpointer:
        tree = checkpointer.metadata(folder / "orbax" / "params").item_metadata.tree
    shapes = jax.tree.map(lambda x: x.sharding.shard_shape(x.shape), random("llama", mesh).params)
    parts = jax.tree.map(lambda x: x.storage.chunk_shape, tree)
    return parts == shapes and any(x.storage.chunk_shape != x.shape for x in jax.tree.leaves(tree))


def saved_together(folder):
    """Saved by all processes from a mesh over them, and read by each: whether they are the same
    bits.
    """
    saved(folder, random("llama", sharding.mesh("model=4")))
    params = random("llama").params
    narrow = random("llama", dtype="int8").params
    read = {
        "orbax": (orbax.restore(folder / "orbax")[0], params),
        "int8": (orbax.restore(folder / "int8", dtype="int8")[0], narrow),
        "huggingface": (huggingface.restore(folder / "huggingface")[0], params),
    }
    same = {
        how: jax.tree.map(lambda x, y: bool((x == y).all()), *pair_of_params)
        for how, pair_of_params in read.items()
    }
    return {how: jax.tree.all(pair_of_params) for how, pair_of_params in same.items()} | {
        "files": sorted(x.name for x in folder.iterdir())
    }


def streamed(mesh):
    target, draft = pair("llama", mesh)
    prompt = Prompt(jnp.asarray(TOKENS[:1]), jnp.array([7], jnp.int32))
    pieces = jaxspec.stream(target, prompt, drafter=draft, gamma=GAMMA, max_new_tokens=NEW)
    return [token for piece in pieces for token in piece.tokens]


def many(mesh=None):
    """The rows of a job of more prompts than slots."""
    target, draft = pair("llama", mesh)
    lengths = [7, 3, 5, 1, 2, 6]
    prompts = [
        {"prompt": TOKENS[n % ROWS, :length], "max_new_tokens": 4 * length}
        for n, length in enumerate(lengths)
    ]
    options = dict(
        rule=rules.coupled(), temperature=0.7, key=jax.random.key(11), max_new_tokens=NEW
    )
    rows = jaxspec.generate_many(
        target, prompts, drafter=draft, gamma=GAMMA, slots=2, group=2, in_order=True, **options
    )
    return [[row.tokens, row.rounds, row.accepted] for row in rows]


def learns(folder, mesh):
    """On a mesh: whether a job that is resumed after a batch ends with the same bits, its texts,
    and its programs.
    """
    target, draft = pair("llama", mesh)

    def learner():
        sizes = dict(max_prompt=7, max_new_tokens=NEW, top_k=8, size=8, rows=4)
        return training.online(draft, optimizer=optax.sgd(0.1, momentum=0.9), **sizes)

    def batch(learner, state):
        options = dict(drafter=learner.drafter(state), gamma=GAMMA, max_new_tokens=NEW)
        out = jaxspec.generate(target, PROMPTS, **options)
        return learner.update(state, target, PROMPTS, out)[0], [row.tolist() for row in out.tokens]

    job, second_job = learner(), learner()
    state, first = batch(job, job.init())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "learner", state)
    programs = loop.generation.num_programs()
    continued, second = batch(job, state)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(folder / "learner", second_job.init())
    resumed, _ = batch(second_job, restored)
    same = jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), continued, resumed))
    moved = bool(
        (
            continued.params["layers_0"]["ff"]["wi"]["weight"]
            != draft.params["layers_0"]["ff"]["wi"]["weight"]
        ).any()
    )
    return dict(
        same=same,
        moved=moved,
        texts=[first, second],
        compiled=loop.generation.num_programs() - programs,
    )


def meshes(folder):
    mesh = sharding.mesh("data=2,model=4")
    report = {}
    on_cpu.SMALL = 0  # so that these matrices are multiplied as large ones are
    for kind in SPLIT:
        split, hlo, part = compiled(kind, mesh)
        outcome = dict(
            one=text(kind),
            split=split,
            gathered=gathered(hlo),
            part=part,
            sums=hlo.count(" all-reduce("),
        )
        report[kind] = outcome
    weight = random("llama", mesh).params["layers_0"]["ff"]["wi"]["weight"]
    gathers = (
        jax.jit(lambda x: x * 2, out_shardings=sharding.rows(weight, None, mesh))
        .lower(weight)
        .compile()
    )
    report["control"] = [gathered(gathers.as_text()), weight.addressable_shards[0].data.size]
    report |= dict(
        rows=rows_over_all_devices(),
        cache={kind: cache_is_placed(kind, mesh) for kind in ("llama", "encoder")},
        streamed=streamed(mesh),
        many=dict(one=many(), mesh=many(mesh)),
        restored=restored(Path(folder), mesh),
        learns=learns(Path(folder), mesh),
        families=of_families(sharding.mesh("model=2")),
    )
    report |= dict(
        left=left_on_the_host(Path(folder) / "again", mesh),
        parts=stored_in_parts(Path(folder), mesh),
    )
    return report | dict(programs=loop.advance.num_programs())


def explicit():
    """Texts of parameters on a mesh with Explicit axes: JAX then asks each operation for the layout
    of its result.
    """
    mesh = jax.make_mesh((2, 4), ("data", "model"), (AxisType.Explicit,) * 2)
    target, draft = pair("llama", mesh)
    assert target.params["head"]["weight"].sharding.mesh.axis_types == mesh.axis_types

    def texts(mesh):
        return [text("llama", mesh), streamed(mesh), many(mesh)]

    def numbers(mesh):
        target, draft = pair("llama", mesh)
        (score,) = jaxspec.score(target, [TOKENS[0].tolist()])
        jaxspec.testing.check_model(target)
        learner = training.online(
            draft, optimizer=optax.sgd(0.1), max_prompt=7, max_new_tokens=NEW, rows=4, steps=1
        )
        out = jaxspec.generate(
            target, PROMPTS, drafter=learner.drafter(learner.init()), max_new_tokens=NEW
        )
        _, loss = learner.update(learner.init(), target, PROMPTS, out)
        return [round(score.log_prob, 2), round(loss, 2)]

    def on_the_mesh():
        with jax.set_mesh(mesh):
            return [text("llama", mesh), numbers(mesh)]

    prepared = jaxspec.prepare(target, PROMPTS, **options(draft))

    def sample(params):
        return jaxspec.rollout(prepared, weights=prepared.weights._replace(target=params)).tokens

    try:
        jax.jit(sample)(target.params)
        refused = ""
    except TypeError as error:
        refused = str(error)
    # A gradient is taken outside of such a mesh.
    alone, alone_draft = pair("llama", None)
    reported = jaxspec.prepare(alone, PROMPTS, **options(alone_draft), log_probs=True)

    def value(params):
        return jaxspec.rollout(
            reported, weights=reported.weights._replace(target=params)
        ).log_probs.sampled.sum()

    try:
        with jax.set_mesh(mesh):
            jax.grad(value)(alone.params)
        no_gradient = ""
    except ValueError as error:
        no_gradient = str(error)
    whole = NamedSharding(mesh, PartitionSpec())
    advised = jax.jit(jax.sharding.auto_axes(sample, axes=("data", "model"), out_sharding=whole))(
        target.params
    )
    same = bool((np.asarray(advised) == np.asarray(jaxspec.rollout(prepared).tokens)).all())
    return dict(
        one=texts(None),
        alone=texts(mesh),
        numbers=numbers(None),
        set_mesh=on_the_mesh(),
        refused=refused,
        advised=same,
        no_gradient=no_gradient,
    )


def process(port, index, folder):
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=int(index))
    report = dict(processes=jax.process_count(), streamed=streamed(sharding.mesh("model=4")))
    # each process has half of the rows
    report["encoder"] = text("encoder", sharding.mesh("data=2,model=2"))
    report["many"] = many(sharding.mesh("data=2,model=2"))
    return report | dict(saved=saved_together(Path(folder)))


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    print(
        json.dumps(
            {"meshes": meshes, "explicit": explicit, "process": process}[command](*arguments)
        )
    )
