"""BART, mBART, Marian and M2M-100 against transformers: logits, texts, beams, drafters, files."""

import dataclasses
import functools
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import DraftHead, Prompt, drafters
from jaxspec.core import Room
from jaxspec.draft_heads import medusa
from jaxspec.nets import bart
from jaxspec.nets.attention import MASKED
from jaxspec.weights import huggingface
from tests.marks import marked

SIZES = dict(
    vocab_size=61,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_ffn_dim=48,
    decoder_ffn_dim=48,
)
SIZES |= dict(encoder_attention_heads=4, decoder_attention_heads=4, max_position_embeddings=40)
IDS = dict(
    pad_token_id=1,
    bos_token_id=0,
    eos_token_id=2,
    decoder_start_token_id=2,
    forced_eos_token_id=None,
)
MARIAN = SIZES | dict(pad_token_id=60, decoder_start_token_id=60, eos_token_id=0, bos_token_id=None)
MARIAN |= dict(scale_embedding=True, activation_function="swish", forced_eos_token_id=None)
CASES = {  # transformers' class, its configuration, and options of its generation
    "bart": ("BartForConditionalGeneration", SIZES | IDS, dict(forced_bos_token_id=5)),
    "bart, own head": (
        "BartForConditionalGeneration",
        SIZES | IDS | dict(tie_word_embeddings=False),
        {},
    ),
    "mbart": (
        "MBartForConditionalGeneration",
        SIZES | IDS | dict(scale_embedding=True),
        dict(forced_bos_token_id=7),
    ),
    "marian": ("MarianMTModel", MARIAN, dict(bad_words_ids=[[60]])),
    "marian, own embeddings": (
        "MarianMTModel",
        MARIAN | dict(share_encoder_decoder_embeddings=False, decoder_vocab_size=67),
        dict(bad_words_ids=[[60]]),
    ),
    "nllb": (
        "M2M100ForConditionalGeneration",
        SIZES | IDS,
        # transformers gives padding no position, though it were generated.
        dict(forced_bos_token_id=9, bad_words_ids=[[1]]),
    ),
}
PLAIN = ("bart", "marian", "nllb")  # one of each kind of norms and positions
NEW, ROWS = 12, 30
PADDING, END = 1, 2


def draw(peer) -> None:
    """Draws all tensors, of sizes with which tokens, positions and prompts have a say, so that
    greedy text varies.
    """
    import torch

    torch.manual_seed(1)
    bias = getattr(peer, "final_logits_bias", None)
    with torch.no_grad():
        for name, x in [*peer.named_parameters(), *([] if bias is None else [("bias", bias)])]:
            is_norm, is_small = (
                "norm" in name and name.endswith("weight"),
                "embed_tokens" in name or "shared" in name,
            )
            if x.requires_grad or name == "bias":  # Marian's sinusoids are not learned
                x.normal_(
                    float(is_norm),
                    0.1
                    if name.endswith("bias")
                    else 0.3
                    if is_small
                    else 1.0
                    if "position" in name
                    else 0.6,
                )


@functools.cache
def peer_of(case: str):
    """Returns transformers' model with random weights."""
    import torch
    import transformers

    torch.set_num_threads(1)
    architecture, options, generation = CASES[case]
    kind = getattr(transformers, architecture)
    peer = kind._from_config(kind.config_class(**options), attn_implementation="eager").eval()
    draw(peer)
    # transformers 5 unties the two sides' embeddings, too; no file has several
    if case == "bart, own head":
        for side in (peer.model.encoder, peer.model.decoder):
            side.embed_tokens.weight = peer.model.shared.weight
    for name, value in generation.items():
        setattr(peer.generation_config, name, value)
    return peer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Writes each model once."""

    @functools.cache
    def folder_of(case):
        folder = tmp_path_factory.mktemp("peer")
        peer_of(case).save_pretrained(folder)
        return folder

    return folder_of


def prompts_of(case, rows=2):
    """Returns ragged prompts, in jaxspec's form and in transformers'."""
    end, padding = (0, 60) if "marian" in case else (END, PADDING)
    random = np.random.RandomState(3)
    tokens, length = random.randint(3, 59, (rows, 7)), random.randint(3, 8, rows)
    length[:2] = 7, 4
    real = np.arange(7)[None] < length[:, None]
    tokens = np.where(real, tokens, padding)
    tokens[np.arange(rows), length - 1] = end
    return Prompt(jnp.array(tokens), jnp.array(length)), tokens, real.astype(np.int64)


def texts(out, end):
    return [row[: row.index(end)] if end in row else row for row in np.asarray(out).tolist()]


@pytest.mark.needs_torch
@pytest.mark.parametrize("case", marked(CASES, slow={*CASES} - {"bart"}))
def test_logits_of_ragged_rows_are_those_of_transformers(case, folders):
    """Prompts and rows of different lengths; what follows is read from the cache."""
    import torch

    model = jaxspec.load(folders(case))
    source, tokens, mask = prompts_of(case)
    rows, length = np.random.RandomState(5).randint(3, 60, (2, 8)), np.array([5, 3])
    with torch.no_grad():
        inputs = dict(attention_mask=torch.tensor(mask), decoder_input_ids=torch.tensor(rows))
        theirs = peer_of(case)(torch.tensor(tokens), **inputs).logits.numpy()
    lm, prompt = model.lm, Prompt(jnp.array(rows[:, :5]), jnp.array(length), source)
    first, cache = jax.jit(lm.prefill)(model.params, prompt, Room(8))
    following, _ = jax.jit(lm.extend)(
        model.params, cache, jnp.array([rows[i, n : n + 3] for i, n in enumerate(length)])
    )
    ours = jnp.concatenate([first.logits, following.logits], axis=1)
    expected = np.stack([theirs[i, n - 1 : n + 3] for i, n in enumerate(length)])
    if banned := model.config.banned_tokens:
        assert (ours[:, :, list(banned)] == MASKED).all()
        ours, expected = (np.delete(np.asarray(x), banned, axis=2) for x in (ours, expected))
    np.testing.assert_allclose(ours, expected, atol=1e-4)
    assert lm.inside is not None
    raw = lm.inside.head(model.params, following.features, raw=True)  # without bans
    np.testing.assert_allclose(raw[0], theirs[0, 5:8], atol=1e-4)


@pytest.mark.needs_torch
@pytest.mark.parametrize("case", CASES)
def test_transformers_reads_what_is_written(case, folders, tmp_path):
    model = jaxspec.load(folders(case))
    huggingface.save(model, tmp_path / "ours")
    again, said = type(peer_of(case)).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(said.values())
    before, after = peer_of(case).state_dict(), again.state_dict()
    for name in before:
        np.testing.assert_array_equal(after[name].numpy(), before[name].numpy(), err_msg=name)
    for name in ("decoder_start_token_id", "eos_token_id", *CASES[case][2]):
        ours, theirs = (getattr(peer.generation_config, name) for peer in (again, peer_of(case)))
        assert ours in (theirs, [theirs]), name
    assert jaxspec.load(tmp_path / "ours").config == model.config


def sibling(case, target):
    """Returns a draft model near the target: most of what it drafts is accepted."""
    noise = np.random.RandomState(1)
    params = jax.tree.map(
        lambda x: x * jnp.float32(1 + 0.05 * noise.normal(size=x.shape)), target.params
    )
    return target._replace(params=params, name="sibling")


def student(case, target):
    """Returns a draft model with the target's encoder and a layer of its decoder."""
    config = dataclasses.replace(target.config, decoder_layers=1)
    params = {name: x for name, x in target.params.items() if name != "decoder_1"}
    draft = jaxspec.Model(bart.language_model(config), params, target.tokenizer, config, "student")
    return drafters.share_encoder(draft, target)


def head(case, target):
    config = medusa.HeadsConfig(
        target.config.vocab_size, 32, heads=3, block="feed_forward", ff_dim=32, own_head=False
    )
    return drafters.heads(
        DraftHead(medusa.head(config), medusa.init(config, jax.random.key(1))), target
    )


DRAFTERS = {
    "sibling": sibling,
    "a tree of a sibling": lambda case, target: drafters.tree(sibling(case, target), (2, 1)),
    "a trimmed sibling": lambda case, target: jaxspec.trim_vocabulary(
        sibling(case, target), size=40
    ),
    "shared encoder": student,
    "prompt lookup": lambda case, target: drafters.prompt_lookup(),
    "layers skipped": lambda case, target: drafters.skip_layers(target, attention=[1], mlp=[1]),
    "a head": head,
}
# what other norms and positions may change
SOME = ("sibling", "a tree of a sibling", "layers skipped")


@pytest.mark.needs_torch
@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_greedy_texts_are_those_of_transformers_plain_and_drafted(case, folders, request):
    import torch

    target = jaxspec.load(folders(case))
    prompt, tokens, mask = prompts_of(case, rows=8)
    options = dict(attention_mask=torch.tensor(mask), max_new_tokens=NEW, do_sample=False)
    theirs = peer_of(case).generate(torch.tensor(tokens), **options).numpy()
    begin = len(target.lm.limits.first_tokens)
    assert theirs[0, :begin].tolist() == list(target.lm.limits.first_tokens)
    end = peer_of(case).generation_config.eos_token_id
    count = NEW - (begin - 1)
    plain = jaxspec.generate(target, prompt, max_new_tokens=count)
    assert texts(plain.tokens, end) == texts(theirs[:, begin:], end)
    assert len({x for row in texts(plain.tokens, end) for x in row}) > 1  # no token over and over
    every = case == PLAIN[0] or request.config.getoption("exhaustive")
    for name in DRAFTERS if every else SOME if case in PLAIN else SOME[:1]:
        drafted = jaxspec.generate(
            target, prompt, drafter=DRAFTERS[name](case, target), gamma=3, max_new_tokens=count
        )
        np.testing.assert_array_equal(drafted.tokens, plain.tokens, err_msg=name)
        if name == "sibling":
            assert drafted.stats.accepted.sum() > 0, name


@pytest.mark.needs_torch
@pytest.mark.slow
# BART's norms with NLLB's positions and bans
@pytest.mark.parametrize("case", marked(PLAIN, exhaustive=("marian",)))
def test_beams_are_those_of_transformers(case, folders):
    """The best texts for thirty prompts, plain and drafted.

    transformers is given each row's beginning: a token that it forces itself would count in its
    texts' lengths.
    """
    import torch

    target = jaxspec.load(folders(case))
    prompt, tokens, mask = prompts_of(case, ROWS)
    peer, begin = peer_of(case), len(target.lm.limits.first_tokens)
    end = peer.generation_config.eos_token_id
    options = dict(
        attention_mask=torch.tensor(mask), max_new_tokens=NEW, do_sample=False, num_beams=4
    )
    rows = torch.tensor([list(target.lm.limits.first_tokens)] * ROWS)
    # Banned tokens have no probability, as in Marian's files.
    options |= dict(decoder_input_ids=rows, forced_bos_token_id=None, renormalize_logits=True)
    theirs = peer.generate(torch.tensor(tokens), **options).numpy()[:, begin:]
    for drafter in (None, student(case, target)):
        ours = jaxspec.beam_search(target, prompt, drafter=drafter, beams=4, max_new_tokens=NEW)
        assert texts(ours.tokens[:, 0], end) == texts(theirs, end)


@pytest.mark.needs_torch
def test_files_may_lack_the_bias_and_the_prefix(folders, tmp_path):
    """As those of models that were published without a head do."""
    from safetensors.numpy import load_file, save_file

    model = jaxspec.load(folders("bart"))
    tensors = load_file(folders("bart") / "model.safetensors")
    named = {
        name.removeprefix("model."): x for name, x in tensors.items() if name != "final_logits_bias"
    }
    named |= {"encoder.version": np.zeros(1, np.float32)}
    save_file(named, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((folders("bart") / "config.json").read_text())
    bare = jaxspec.load(tmp_path)
    assert model.config.logits_bias and not bare.config.logits_bias
    assert bare.params.keys() == model.params.keys() - {"head"}


def written(folder, name, **changes):
    path = folder / name
    table = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(table | changes))


@pytest.mark.needs_torch
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(num_beams=6), ["asks for num_beams=6, which", "there: pass `beam_search` beams"]),
        (
            dict(num_beams=4, length_penalty=2.0, early_stopping=True),
            [
                "num_beams=4, length_penalty=2.0, early_stopping=True, which",
                "there: pass `beam_search` beams, length",
            ],
        ),
        (
            dict(num_beams=4, length_penalty=1.0, early_stopping=False),
            ["asks for num_beams=4, which"],
        ),
        (
            dict(forced_eos_token_id=2),
            ["asks for forced_eos_token_id=2, which", "there: no end is forced"],
        ),
        (
            dict(forced_eos_token_id=2, num_beams=2, min_length=3),
            [
                "there: pass what `generate` has to it as options; pass `beam_search` beams",
                "; no end is forced",
            ],
        ),
        (dict(bad_words_ids=[[7], [8, 9]]), ["[8, 9]", "sampling.banned_words"]),
    ],
)
def test_what_a_generation_file_asks_for_in_vain_is_said(changes, words, folders, tmp_path, caplog):
    written(tmp_path, "config.json", **json.loads((folders("bart") / "config.json").read_text()))
    written(
        tmp_path,
        "generation_config.json",
        decoder_start_token_id=2,
        forced_bos_token_id=5,
        **changes,
    )
    with caplog.at_level(logging.WARNING):
        _, config = huggingface.read_config(tmp_path)
    assert all(word in caplog.text for word in words)
    assert config.begin_tokens == (5,)
    assert config.banned_tokens == ((7,) if "bad_words_ids" in changes else ())


@pytest.mark.needs_torch
def test_options_of_beams_are_nothing_to_greedy_text(folders, tmp_path, caplog):
    written(tmp_path, "config.json", **json.loads((folders("bart") / "config.json").read_text()))
    written(
        tmp_path, "generation_config.json", num_beams=1, length_penalty=2.0, early_stopping=True
    )
    huggingface.read_config(tmp_path)
    assert not caplog.text


@pytest.mark.needs_torch
@pytest.mark.parametrize(("ends", "banned"), [(2, (7, 3)), ([2, 3], (7,)), (None, (7, 2, 3))])
def test_end_tokens_are_not_banned(ends, banned, tmp_path):
    """As in transformers, whose processor drops them: no text would end."""
    import transformers

    words = [[7], [2], [3]]
    written(tmp_path, "config.json", **(SIZES | IDS | {"model_type": "bart"}))
    written(tmp_path, "generation_config.json", eos_token_id=ends, bad_words_ids=words)
    _, config = huggingface.read_config(tmp_path)
    theirs = transformers.NoBadWordsLogitsProcessor(words, eos_token_id=ends)
    assert (
        {(token,) for token in config.banned_tokens}
        == {*theirs.sequence_bias}
        == {(token,) for token in banned}
    )


@pytest.mark.parametrize(("start", "is_refused"), [(64, False), (67, True)])
def test_a_row_begins_with_an_id_of_the_decoder(start, is_refused, tmp_path):
    """The encoder of these files has 61 ids."""
    options = CASES["marian, own embeddings"][1] | {"model_type": "marian"}
    written(tmp_path, "config.json", **(options | {"decoder_start_token_id": start}))
    if is_refused:
        with pytest.raises(
            huggingface.CheckpointError, match=r"decoder_start_token_id is 67: expected .* 0 to 66"
        ):
            huggingface.read_config(tmp_path)
    else:
        assert huggingface.read_config(tmp_path)[1].start_token == start


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(forced_bos_token_id="5"), "forced_bos_token_id is '5': expected an id from 0 to 60"),
        (
            dict(forced_bos_token_id=[5]),
            r"forced_bos_token_id is \[5\]: expected an id from 0 to 60",
        ),
        (dict(forced_bos_token_id=-1), "forced_bos_token_id is -1: expected an id from 0 to 60"),
        (
            dict(bad_words_ids=[5]),
            r"bad_words_ids is \[5\]: expected a list of words, each a list of ids",
        ),
        (dict(bad_words_ids=5), "bad_words_ids is 5: expected a list of words"),
        (dict(bad_words_ids=[[]]), r"bad_words_ids is \[\[\]\]: expected a list of words"),
        (
            dict(bad_words_ids=[[5], [6, 61]]),
            "an id in bad_words_ids is 61: expected an id from 0 to 60",
        ),
        (
            dict(bad_words_ids=[["<pad>"]]),
            "an id in bad_words_ids is '<pad>': expected an id from 0 to 60",
        ),
    ],
)
def test_wrong_options_are_refused_by_file_and_key(file, changes, message, tmp_path):
    written(tmp_path, "config.json", **(SIZES | IDS | {"model_type": "bart"}))
    written(tmp_path, file, **changes)
    with pytest.raises(huggingface.CheckpointError, match=f"/{file} .*: {message}"):
        huggingface.read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(encoder_ffn_dim=64), "encoder_ffn_dim is 64: only 48 is supported"),
        (
            dict(decoder_attention_heads=5, encoder_attention_heads=5),
            "dim is 32, which is no multiple of heads=5",
        ),
        (dict(forced_bos_token_id=61), "forced_bos_token_id is 61: expected an id from 0 to 60"),
        (
            dict(decoder_ffn_dim=-1, encoder_ffn_dim=-1),
            "encoder_ffn_dim is -1: expected a positive integer",
        ),
    ],
)
def test_refuses_what_the_network_has_not(changes, message, tmp_path):
    options = SIZES | IDS | {"model_type": "bart"}
    written(tmp_path, "config.json", **(options | changes))
    with pytest.raises(huggingface.CheckpointError, match=message):
        huggingface.read_config(tmp_path)


def test_refuses_positions_of_another_kind():
    with pytest.raises(
        ValueError, match="positions is 'rotary': expected one of learned, sinusoids"
    ):
        bart.BartConfig(32, 16, 32, 2, 1, 1, positions="rotary")


def test_prompts_have_the_ids_of_the_encoder():
    """Where the sides have two vocabularies; look-ups draft none of the source's ids that the
    decoder lacks.
    """
    config = bart.BartConfig(11, 8, 16, 2, 1, 1, source_vocab=40, start_token=2, max_positions=30)
    model = jaxspec.Model(
        bart.language_model(config), bart.init(config, jax.random.key(0)), None, config
    )
    source, options = [[39, 3, 38, 3, 5]], dict(max_new_tokens=9, eos_ids=())
    plain = jaxspec.generate(model, source, **options)
    out = jaxspec.generate(model, source, drafter=drafters.prompt_lookup(1), gamma=3, **options)
    np.testing.assert_array_equal(out.tokens, plain.tokens)
    with pytest.raises(ValueError, match="token id 40: expected ids from 0 to 39"):
        jaxspec.generate(model, [[40]], **options)
    with pytest.raises(ValueError, match="token id 11: expected ids from 0 to 10"):
        list(jaxspec.score(model, [([39], [11])]))
