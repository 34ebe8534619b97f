"""`jaxspec.ray.RayDecoder` in Ray Data: two actors, one of them killed, write what one does."""

import os
import signal

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec.jobs import slots
from jaxspec.ray import RayDecoder

ROWS = 40


def load():
    import jax

    from jaxspec.testing import table_model, word_tokenizer

    words = word_tokenizer(["<unk>", "</s>", "the", "old", "cat"])
    target, draft = (
        table_model(jax.random.key(seed), vocab=5)._replace(tokenizer=words) for seed in (1, 2)
    )
    return target, draft


OPTIONS = dict(load=load, number="id", seed=3, max_new_tokens=12, slots=4, temperature=1.0, gamma=2)
PROMPTS = np.random.default_rng(0).choice(["the old", "cat the cat", "old"], ROWS)


class Dying(RayDecoder):
    """One of the actors is killed once, in its second batch."""

    def __init__(self, mark, **options):
        super().__init__(**options)
        self._mark, self._batches = mark, 0

    def __call__(self, batch):
        self._batches += 1
        if self._batches == 2:
            try:
                os.close(os.open(self._mark, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning"
)
# Ray starts processes, and tests before may have used jax
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_two_actors_of_which_one_dies_write_what_one_does(tmp_path):
    ray = pytest.importorskip("ray", reason="pip install 'ray[data]'")
    pytest.importorskip("ray.data", reason="pip install 'ray[data]'")
    paths = {
        "env_vars": {
            "PYTHONPATH": os.pathsep.join(
                [*filter(None, [os.environ.get("PYTHONPATH")]), os.getcwd()]
            )
        }
    }
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=paths)
    try:
        data = ray.data.from_items(
            [{"prompt": str(p), "id": n} for n, p in enumerate(PROMPTS)]
        ).repartition(8)
        mark = tmp_path / "killed"
        shared = dict(batch_size=5, num_cpus=1, max_restarts=2, max_task_retries=2)
        rows = data.map_batches(
            Dying,
            fn_constructor_kwargs=OPTIONS | {"mark": str(mark), "top_log_probs": 1},
            compute=ray.data.ActorPoolStrategy(size=2),
            **shared,
        ).take_all()
    finally:
        ray.shutdown()
    assert mark.exists()
    one = RayDecoder(**OPTIONS, top_log_probs=1)({"prompt": PROMPTS, "id": np.arange(ROWS)})
    rows.sort(key=lambda row: row["id"])
    assert [row["text"] for row in rows] == one["text"].tolist()
    assert [row["accepted"] for row in rows] == one["accepted"].tolist()
    for row, *expected in zip(
        rows, one["tokens"], one["raw_log_probs"], one["top_log_probs"], strict=True
    ):
        for name, values in zip(
            ("tokens", "raw_log_probs", "top_log_probs"), expected, strict=True
        ):
            np.testing.assert_allclose(row[name], values, atol=1e-5)


def test_a_warm_actor_compiles_nothing():
    """Batches smaller and larger than the slots, with prompts of each width."""
    programs = (slots.prefill, slots.run_rounds, slots.insert, slots.empty)
    decoder = RayDecoder(**OPTIONS | {"slots": 3}, max_prompt_tokens=40)
    compiled = [program.num_programs() for program in programs]
    for count in (1, 2, 7):
        prompts = np.array(["old " * (1 + 12 * (n % 3)) for n in range(count)])
        assert list(decoder({"prompt": prompts, "id": np.arange(count)})["error"]) == [None] * count
    assert [program.num_programs() for program in programs] == compiled


def test_a_row_has_its_tokens_and_log_probabilities():
    """As `generate_many` has them; nothing of a prompt that has an error, unless it is to be
    raised.
    """
    decoder = RayDecoder(**OPTIONS, top_log_probs=2)
    batch = {"prompt": np.array([[2, 3], [], [2, 3, 4]], object), "id": np.arange(3)}
    columns = decoder(batch)
    target, draft = load()
    options = {name: OPTIONS[name] for name in ("max_new_tokens", "slots", "temperature", "gamma")}
    job = dict(
        drafter=draft,
        key=jax.random.key(3),
        top_log_probs=2,
        in_order=True,
        on_error="yield",
        **options,
    )
    for index, row in enumerate(jaxspec.generate_many(target, batch["prompt"].tolist(), **job)):
        assert columns["tokens"][index].tolist() == row.tokens
        assert columns["new_tokens"][index] == len(row.tokens)
        if row.error is None:
            names = dict(
                raw="raw_log_probs",
                sampled="sampled_log_probs",
                top_tokens="top_tokens",
                top_raw="top_log_probs",
            )
            for field, name in names.items():
                np.testing.assert_array_equal(columns[name][index], getattr(row.log_probs, field))
    assert [columns[name][1].shape for name in ("tokens", "raw_log_probs", "top_log_probs")] == [
        (0,),
        (0,),
        (0, 2),
    ]
    assert "tokens" not in RayDecoder(**OPTIONS)(batch) and "tokens" in RayDecoder(
        **OPTIONS, tokens=True
    )(batch)
    with pytest.raises(ValueError, match="prompt 1: the prompt is empty"):
        RayDecoder(**OPTIONS, on_error="raise")(batch)


@pytest.mark.parametrize(
    ("name", "said"), [("key", "give seed"), ("in_order", "stay"), ("drafter", "load returns it")]
)
def test_an_option_is_honoured_or_refused(name, said):
    with pytest.raises(ValueError, match=f"{name} is not an option of RayDecoder: .*{said}"):
        RayDecoder(**OPTIONS, **{name: None})


def test_numbers_are_required_where_tokens_are_drawn():
    with pytest.raises(ValueError, match="number is None"):
        RayDecoder(**OPTIONS | {"number": None})
    with pytest.raises(ValueError, match="too_long is 'skip'"):
        RayDecoder(**OPTIONS, too_long="skip")
    with pytest.raises(ValueError, match="no column 'prompt', but"):
        RayDecoder(**OPTIONS)({"text": np.array(["the"]), "id": np.arange(1)})
