"""The types of jaxspec: one NamedTuple of pure functions per concept, one Protocol per slot. No logic.

A file per concept, to be read in this order:

    language_model  Prompt, Forward, Tree, LanguageModel: prefill, extend, rewind; Model, with its parameters
    law             Law, Prefix, and a Warp, which makes a law of logits
    draft           Draft, Verdict, and an AcceptRule, which says which guesses are kept
    drafter         Drafter: init, propose, commit; the Budget of a round
    policy          Policy: how many tokens to guess
    decoder         Decoder: init, step; the Request, DecodeState and Stats of a generation

Import the names from here.

Axis letters, here and in every file:
    B batch, P prompt, T step (tokens fed in one pass), S capacity of a buffer, G gamma (draft length),
    V vocabulary, L layers, H query heads, K key-value heads, D head dimension, M model dimension.

A *row* is what the decoder side of a model reads: for a decoder-only model the prompt and everything generated
after it, for an encoder-decoder its start token and everything generated after that. `tokens[:length]` of a row are
committed; caches hold the first `length - 1` of them ("one token behind"), so the last committed token is the first
one fed in the next pass. Positions and lengths always count within the row.
"""

from jaxspec.base.decoder import Decoder, DecoderInit, DecoderStep, DecodeState, Request, RoundInfo, Stats, Weights
from jaxspec.base.draft import AcceptRule, Draft, Verdict
from jaxspec.base.drafter import Budget, Commit, Drafter, DraftInit, Propose
from jaxspec.base.language_model import (
    Cache,
    Extend,
    Forward,
    Head,
    Keys,
    LanguageModel,
    Model,
    Params,
    Prefill,
    Prompt,
    Rewind,
    Tree,
)
from jaxspec.base.law import Law, Prefix, Stage, ToLaw, Warp
from jaxspec.base.policy import Policy, PolicyGoOn, PolicyInit, PolicyLimit, PolicyUpdate

__all__ = [
    "AcceptRule",
    "Budget",
    "Cache",
    "Commit",
    "DecodeState",
    "Decoder",
    "DecoderInit",
    "DecoderStep",
    "Draft",
    "DraftInit",
    "Drafter",
    "Extend",
    "Forward",
    "Head",
    "Keys",
    "LanguageModel",
    "Law",
    "Model",
    "Params",
    "Policy",
    "PolicyGoOn",
    "PolicyInit",
    "PolicyLimit",
    "PolicyUpdate",
    "Prefill",
    "Prefix",
    "Prompt",
    "Propose",
    "Request",
    "Rewind",
    "RoundInfo",
    "Stage",
    "Stats",
    "ToLaw",
    "Tree",
    "Verdict",
    "Warp",
    "Weights",
]
