"""`jaxspec.ray.Decoder` in Ray Data: two actors, one of them killed, write what one does."""

import os
import signal

import numpy as np
import pytest

from jaxspec.ray import Decoder

ROWS = 40


def load():
    import jax

    from jaxspec.testing import table_model, word_tokenizer

    words = word_tokenizer(["<unk>", "</s>", "the", "old", "cat"])
    target, draft = (table_model(jax.random.key(seed), vocab=5)._replace(tokenizer=words) for seed in (1, 2))
    return target, draft


OPTIONS = dict(load=load, number="id", seed=3, max_new_tokens=12, slots=4, temperature=1.0, gamma=2)
PROMPTS = np.random.default_rng(0).choice(["the old", "cat the cat", "old"], ROWS)


class Dying(Decoder):
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
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning")
def test_two_actors_of_which_one_dies_write_what_one_does(tmp_path):
    ray = pytest.importorskip("ray", reason="pip install 'ray[data]'")
    pytest.importorskip("ray.data", reason="pip install 'ray[data]'")
    paths = {"env_vars": {"PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), os.getcwd()])}}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env=paths)
    try:
        data = ray.data.from_items([{"prompt": str(p), "id": n} for n, p in enumerate(PROMPTS)]).repartition(8)
        mark = tmp_path / "killed"
        shared = dict(batch_size=5, num_cpus=1, max_restarts=2, max_task_retries=2)
        rows = data.map_batches(
            Dying,
            fn_constructor_kwargs=OPTIONS | {"mark": str(mark)},
            compute=ray.data.ActorPoolStrategy(size=2),
            **shared,
        ).take_all()
    finally:
        ray.shutdown()
    assert mark.exists()
    one = Decoder(**OPTIONS)({"prompt": PROMPTS, "id": np.arange(ROWS)})
    rows.sort(key=lambda row: row["id"])
    assert [row["text"] for row in rows] == one["text"].tolist()
    assert [row["accepted"] for row in rows] == one["accepted"].tolist()


def test_numbers_are_required_where_tokens_are_drawn():
    with pytest.raises(ValueError, match="number is None"):
        Decoder(**OPTIONS | {"number": None})
    with pytest.raises(ValueError, match="too_long is 'skip'"):
        Decoder(**OPTIONS, too_long="skip")
    with pytest.raises(ValueError, match="no column 'prompt', but"):
        Decoder(**OPTIONS)({"text": np.array(["the"]), "id": np.arange(1)})
