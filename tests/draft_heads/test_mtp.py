"""The module for multi-token prediction in a Qwen 3.5's folder: its logits, drafted and sampled
text, its refusals.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxspec
from jaxspec import drafters, rules
from jaxspec.core import Prompt
from jaxspec.draft_heads import formats, mtp
from jaxspec.draft_heads.load import read_head
from jaxspec.draft_heads.save import save
from jaxspec.drafters.hidden_states import DraftHead
from jaxspec.testing import certify
from tests.families.test_qwen3_5 import model, options, peer, rows_of
from tests.marks import marked
from tests.small import random_params

PROMPT, FIRST, GAMMA = [3, 1, 4, 1, 5], 9, 3  # as in conftest.py
NORMS = {"pre_fc_norm_embedding": "embedding", "pre_fc_norm_hidden": "hidden", "norm": "last"}


class Reference:
    """The module made of transformers' parts of a Qwen 3.5, put together as SGLang's and vLLM's
    `qwen3_5_mtp.py`.

    A layer with attention reads a projection of two norms, of the token's embedding and of the
    hidden state of the position before. A third norm follows; what it gives goes to the target's
    head, and on to the next token.
    """

    def __init__(self, seed):
        import torch
        from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

        self.target, draw = peer(seed), torch.Generator().manual_seed(7)
        config = self.target.config
        index = config.layer_types.index("full_attention")
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.norms = {
            name: modeling.Qwen3_5RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
            for name in NORMS
        }
        self.layer = modeling.Qwen3_5DecoderLayer(config, index).eval()
        for module in (self.fc, self.layer, *self.norms.values()):
            for x in module.parameters():
                x.data = 0.3 * torch.randn(x.shape, generator=draw)

    def tensors(self):
        """The tensors as published files name them."""
        tensors = {f"mtp.layers.0.{name}": x for name, x in self.layer.state_dict().items()}
        tensors |= {f"mtp.{name}.weight": norm.weight for name, norm in self.norms.items()}
        return {
            name: x.detach().numpy()
            for name, x in (tensors | {"mtp.fc.weight": self.fc.weight}).items()
        }

    def logits(self, draft):
        """The logits of each draft token; all before it are fed again."""
        import torch

        base, rows = self.target.model, torch.tensor([PROMPT])
        with torch.no_grad():
            hidden, tokens, logits = (
                base(rows, use_cache=False).last_hidden_state,
                [*PROMPT[1:], FIRST],
                [],
            )
            for token in draft:
                embedded = base.embed_tokens(torch.tensor([tokens]))
                pair = (
                    self.norms["pre_fc_norm_embedding"](embedded),
                    self.norms["pre_fc_norm_hidden"](hidden),
                )
                x, position = self.fc(torch.cat(pair, dim=-1)), torch.arange(len(tokens))[None]
                turned = base.rotary_emb(x, position)
                mask = torch.full((len(tokens),) * 2, float("-inf")).triu(1)[None, None]
                x = self.layer(
                    x, position_embeddings=turned, attention_mask=mask, position_ids=position
                )
                x = self.norms["norm"](x[0] if isinstance(x, tuple) else x)
                logits.append(self.target.lm_head(x[0, -1]))
                hidden, tokens = torch.cat([hidden, x[:, -1:]], dim=1), [*tokens, token]
        return torch.stack(logits).log_softmax(-1).numpy()


def written(folder, seed, also_sees):
    """A target's folder with its module, in one of its two spellings, and the reference."""
    from safetensors.numpy import load_file, save_file

    reference = Reference(seed)
    peer(seed).save_pretrained(folder)
    table, tensors = (
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
    )
    if also_sees:
        tensors = {
            name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()
        }
        tensors |= {"model.visual.blocks.0.norm1.weight": np.ones(3, np.float32)}
        table = {
            "model_type": "qwen3_5",
            "text_config": table,
            "tie_word_embeddings": table["tie_word_embeddings"],
        }
    (folder / "config.json").write_text(json.dumps(table | {"mtp_num_hidden_layers": 1}))
    save_file(tensors | reference.tensors(), folder / "model.safetensors")
    return reference


@pytest.mark.needs_torch
@pytest.mark.parametrize(
    ("seed", "also_sees"),
    marked(
        [(0, True), (1, False), (2, False), (3, True), (4, False)],
        slow=[(n, n == 3) for n in range(1, 5)],
    ),
)
def test_logits_are_those_of_transformers_parts(seed, also_sees, draft_of, tmp_path):
    """Tied heads and not, biases, shares of rotated dimensions; of models of text, and of such that
    also see.
    """
    reference = written(tmp_path, seed, also_sees)
    target = jaxspec.load(tmp_path, dtype="float32")
    config, _ = read_head(tmp_path, target=target)
    assert config.layer.layers[0].attention.gate and config.layer.norm.from_one
    assert config.layer.norm.epsilon == options(seed).get("rms_norm_eps", 1e-6)
    tokens, log_probs = draft_of(jaxspec.load_drafter(tmp_path, target=target))
    expected = reference.logits(tokens)
    assert np.abs(log_probs - expected).max() < 1e-4 * max(1, np.abs(expected).max())
    assert np.ptp(expected) > 1.0


# --- text


@functools.cache
def module(small=False, seed=3):
    """A random module of a random target, both ours."""
    target = model(0, small=small)
    config = mtp.read({}, {"qwen.fc.weight": (target.config.dim, 0)}, formats.target_shape(target))
    params = random_params(mtp.init, config, seed, 0.3)
    return drafters.mtp(DraftHead(mtp.head(config), params), target)


@pytest.mark.slow
def test_drafted_text_is_plain_text():
    """A ragged batch whose first row is longer than a chunk of the recurrence; in slots; from a
    prefix.
    """
    target, limits = module().target, dict(max_new_tokens=12, eos_ids=())
    rows = [rows_of(2)[i, :n].tolist() for i, n in enumerate((70, 3, 1))]
    plain = jaxspec.generate(target, rows, **limits).tokens.tolist()
    for gamma in (1, 4):
        out = jaxspec.generate(target, rows, drafter=module(), gamma=gamma, **limits)
        assert out.tokens.tolist() == plain and out.stats.drafted.sum() > 0
    order = [0, 1, 2, 1, 0]
    job = jaxspec.generate_many(
        target,
        [rows[i] for i in order],
        slots=2,
        in_order=True,
        drafter=module(),
        gamma=3,
        **limits,
    )
    assert [list(row.tokens) for row in job] == [plain[i] for i in order]
    prefix = jaxspec.prefix(target, rows[0][:66], drafter=module())
    out = jaxspec.generate(
        target, [rows[0][66:]], prefix=prefix, drafter=module(), gamma=3, **limits
    )
    assert out.tokens.tolist() == plain[:1]


@pytest.mark.slow
def test_the_distribution_of_the_text_is_the_targets():
    drafter, prompt = module(small=True), Prompt(jnp.array([[1, 2, 1]]), jnp.array([3]))
    off = certify(
        drafter.target, drafter=drafter, rule=rules.rejection(), gamma=2, steps=3, prompt=prompt
    )
    assert off < 1e-5, off


def test_trees_are_refused_for_a_recurrent_target():
    """The module itself could draft them: its one layer has attention."""
    tree = drafters.tree(module(small=True), (2, 1))
    with pytest.raises(
        ValueError, match=r"the target takes chains only .*recurrent layers take no trees"
    ):
        jaxspec.generate(tree.target, [[1, 2]], drafter=tree, max_new_tokens=4)


# --- files


def test_what_is_written_is_read_again(tmp_path):
    """In the form of speculators, whose layer is then a Qwen 3.5's: gates, and norms that store
    their scale minus 1.
    """
    drafter = module(small=True)
    target = drafter.target
    config = mtp.read({}, {"qwen.fc.weight": (target.config.dim, 0)}, formats.target_shape(target))
    again, same = read_head(
        save(config, drafter.params, tmp_path / "it", target=target), target=target
    )
    assert again == config and config.layer.norm.from_one
    jax.tree.map(np.testing.assert_array_equal, same, drafter.params)
