"""The core of jaxspec, to be read first and in this order: the types, then what every decoder
shares.

The types are one NamedTuple of pure functions per concept and one Protocol per slot, a file per
concept:

    language_model  Prompt, Forward, LanguageModel: prefill, extend, rewind, select; Model, with its parameters
    distribution    Distribution, Preceding, LogitsProcessor, and a Sampler, which makes a distribution of logits
    processor       Processor: a logits processor that remembers the row, such as an automaton
    draft           Draft, a tree of draft tokens (a chain is the special case without a `parent`); Verdict
    rule            Rule: which draft tokens are accepted
    drafter         Drafter: init, propose, commit; the DraftContext of a round; BoundDrafter, with values
    policy          Policy: how many tokens to draft
    decoder         Decoder: init, step; Weights and Caches of both models; Request, State and Stats of a generation;
                    RoundResult, of which TargetPass is a part; Follower: told of every round,
                    remembers something of it (policy, processors, log probabilities)

Import the types from `jaxspec.core`. What follows uses nothing but the types; import the modules:

    noise           random numbers, addressed by a row's key, a position and a purpose
    tree            token trees: parents, depths, ancestors
    passes          a pass over some tokens: their positions, the mask of a chain or a tree
    layer_caches    the cache of a layer, of any kind
    kv_cache        the cache of all layers; one length per row, rewind, select
    branches        what is done or not done, with caches that stay in place
    chunks          long prompts, read chunk by chunk through a model's `extend`
    token_rows      right-padded rows of tokens: buckets, windows, repeated rows
    token_ids       a tokenizer's ids: how many, around a text, at its end
    checks          what users give: numbers, names, ids, types, models, keys
    programs        compiled programs: which are kept, and where they are stored
    round           one round: a draft, the target's pass over it, the verdict

The algorithm is then in `jaxspec.decode.speculative`, `jaxspec.drafters.stepwise` (with
`drafters.model`) and `jaxspec.rules.rejection`; greedy rounds are judged by
`rules.common.exact_match`.

Axis letters, here and in every file: B batch, P prompt, T step (tokens fed in one pass), S capacity
    of a buffer, G gamma (draft length), N nodes of a token tree (for a chain N = G), V vocabulary,
    L layers, H query heads, K key-value heads, D head dimension, M model dimension.

A *row* is what the decoder side of a model reads: for a decoder-only model the prompt and
everything generated after it, for an encoder-decoder its start token and everything generated after
that. `tokens[:length]` of a row are committed; caches hold the first `length - 1` of them ("one
token behind"), so the last committed token is the first one fed in the next pass. Positions and
lengths always count within the row.
"""

from jaxspec import optional_imports
from jaxspec.core.decoder import (
    Caches,
    Decoder,
    DecoderInit,
    DecoderStep,
    Failure,
    Finish,
    Follower,
    FollowerInit,
    FollowerUpdate,
    LogProbs,
    Memory,
    Request,
    RoundInfo,
    RoundResult,
    State,
    Stats,
    TargetPass,
    TraceNumbers,
    Weights,
)
from jaxspec.core.distribution import (
    Distribution,
    LogitsProcessor,
    Preceding,
    Sampler,
    ToDistribution,
)
from jaxspec.core.draft import Draft, Draw, Verdict
from jaxspec.core.drafter import (
    BoundDrafter,
    Commit,
    CompleteTargetPass,
    DraftContext,
    Drafter,
    DraftInit,
    DraftStart,
    Proposal,
    Propose,
    Reading,
    Rollback,
    RoundEnd,
    Steps,
    TreeSize,
)
from jaxspec.core.language_model import (
    Before,
    Cache,
    Embed,
    Encoder,
    Extend,
    Forward,
    Head,
    Inside,
    Keys,
    LanguageModel,
    Layers,
    Limits,
    Model,
    Params,
    Parts,
    Prefill,
    Prompt,
    Rewind,
    Room,
    Select,
)
from jaxspec.core.policy import (
    BoundPolicy,
    Policy,
    PolicyInit,
    PolicyMaxDraft,
    PolicyShorten,
    PolicyShouldContinue,
    PolicyUpdate,
)
from jaxspec.core.processor import (
    BoundProcessor,
    Processor,
    ProcessorAdvance,
    ProcessorAhead,
    ProcessorInit,
)
from jaxspec.core.rule import AcceptanceRatio, Rule, Trials, TrialsOf, Verify

__all__ = [name for name in dir() if name[0].isupper()]  # not its modules

__getattr__ = optional_imports.submodules(__name__)
