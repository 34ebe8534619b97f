"""A round that would take back more tokens than a cache was made to take back is refused while it
is traced.
"""

import functools

import jax
import pytest

from jaxspec import Model, drafters, nets
from jaxspec.core import BoundDrafter, Room
from jaxspec.core import kv_cache as kv
from jaxspec.core.round import check_room
from jaxspec.decode import loop
from jaxspec.decode.request import prepare
from jaxspec.nets import decoder
from tests.rehearsals import test_recurrent_family

VOCAB, PROMPTS = 11, [[3, 1, 4, 1, 5], [9]]
CONFIG = decoder.decoder_config(VOCAB, dim=8, ff_dim=8, layers=1, heads=2, kv_heads=1, head_dim=4)
RING = nets.replace(CONFIG, window=3, local=(True,))


@functools.cache
def small(name):
    if name == "recurrent":
        return test_recurrent_family.model()
    config = {"whole": CONFIG, "ring": RING}[name]
    return Model(
        decoder.language_model(config), decoder.init(config, jax.random.key(0)), config=config
    )


def begun(prepared):
    """The state after prefill, as shapes."""
    begin = functools.partial(loop.start, prepared.decoder, max_new_tokens=prepared.max_new_tokens)
    return jax.eval_shape(begin, prepared.weights, prepared.prompt, prepared.request)


def goes_on(prepared, state):
    jax.eval_shape(functools.partial(loop.advance, prepared.decoder), prepared.weights, state)


@pytest.mark.parametrize("name", ["whole", "ring", "recurrent"])
def test_rows_that_another_decoder_began_with_less_room(name):
    target = small(name)
    few, many = (
        prepare(target, PROMPTS, drafter=drafters.prompt_lookup(), gamma=gamma) for gamma in (2, 4)
    )
    goes_on(few, begun(few))
    goes_on(few, begun(many))  # there is room to spare
    with pytest.raises(
        ValueError, match=r"takes back at most 4 tokens .* a round up to 5: .* with the decoder"
    ):
        goes_on(many, begun(few))
    with pytest.raises(ValueError, match=r"the cache takes back at most 2 tokens"):
        goes_on(few, begun(few.plain()))


def test_the_drafting_model_of_a_cascade_is_a_target_too():
    cascade = drafters.cascade(small("ring"), drafters.prompt_lookup(), gamma=6)
    silent = cascade._replace(functions=cascade.functions._replace(spare=0))
    for drafter, gamma in ((cascade, 1), (silent, 5)):
        prepared = prepare(small("ring"), PROMPTS, drafter=drafter, gamma=gamma)
        goes_on(prepared, begun(prepared))
    prepared = prepare(small("ring"), PROMPTS, drafter=silent, gamma=1)
    with pytest.raises(
        ValueError, match=r"takes back at most 3 tokens .* up to 7: .* Drafter\.spare"
    ):
        goes_on(prepared, begun(prepared))


@pytest.mark.parametrize("name", ["whole", "ring", "recurrent"])
def test_a_drafter_that_gives_the_target_another_cache(name):
    """One that takes back less, or that holds less."""
    target, lookup = small(name), drafters.prompt_lookup().functions

    def propose(room, weights, caches, context):
        draft, caches = lookup.propose(weights, caches, context)
        _, cache = target.lm.prefill(weights.target, context.row, room)
        return draft, caches._replace(target=cache)

    for room in (Room(64, rewind=1), Room(64)):
        drafter = BoundDrafter(lookup._replace(propose=functools.partial(propose, room)))
        prepared = prepare(target, PROMPTS, drafter=drafter, gamma=2)
        with pytest.raises(
            ValueError, match=r"a target's cache of another kind or room: expected the one"
        ):
            goes_on(prepared, begun(prepared))


def test_a_cache_for_any_rewind_takes_every_round():
    cache = kv.empty(1, Room(8), [kv.window(1, 4, width=3)])
    check_room((cache, {"length": cache.length}), 1000)
