"""models/*.toml into frozen dataclasses. Strict: an unknown key, a missing one or a wrong type is
an error.
"""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from jaxspec.core.checks import at_least, in_range, number, one_of, suggest
from jaxspec.draft_heads import KINDS
from jaxspec.draft_heads.training import Training
from jaxspec.files import read_text
from jaxspec.files.strict_tables import RecipeError, build
from jaxspec.nets import decoder_layers, net_of
from jaxspec.training import unused_keys
from jaxspec.training.divergences import DIVERGENCES
from jaxspec.weights import hf_families, source

HEADS = {head_kind.name: head_kind.sizes for head_kind in KINDS if head_kind.sizes is not None}
TRAININGS = {
    head_kind.name: head_kind.training for head_kind in KINDS if head_kind.training is not None
}


@dataclasses.dataclass(frozen=True)
class Data:
    """The data to train on; files and folders are relative to the data folder."""

    train: str  # JSON lines
    heldout: str  # JSON lines of which the loss or the acceptance is measured
    # batches' [source, target] in tokens ([0, target] for a language model)
    shapes: tuple[tuple[int, int], ...]
    tokenizer: str = ""  # a tokenizer's folder; of a head's recipe empty: the target's
    tasks: tuple[str, ...] = ()  # the file's tasks to use (empty for a language model)
    # how often each of the tasks counts in an epoch (empty: once each)
    repeat: tuple[int, ...] = ()
    also: tuple[str, ...] = ()  # more files to train on; one that is named n times counts n times

    @property
    def longest(self) -> int:
        """The longest target, in tokens."""
        return max(target_tokens for _, target_tokens in self.shapes)


def check_data(data: Data, encoder: bool) -> None:
    """Raises RecipeError for data that are not those of the model's kind, with an encoder or
    without.
    """
    if encoder and not data.tasks:
        raise RecipeError(
            "data.tasks is empty: an encoder-decoder learns tasks; expected some of the file's"
        )
    if not encoder and data.tasks:
        raise RecipeError(
            f"data.tasks is {list(data.tasks)}: a decoder-only model learns texts without tasks; "
            "leave it out"
        )
    if data.repeat and len(data.repeat) != max(1, len(data.tasks)):
        raise RecipeError(
            f"data.repeat is {list(data.repeat)}: expected a number for each of {list(data.tasks)}"
        )
    unfit = [shape for shape in data.shapes if (shape[0] > 0) != encoder]
    if unfit:
        if encoder:
            expected = "[source, target] with a source"
        else:
            expected = "[0, target]: a decoder-only model reads no source"
        raise RecipeError(f"data.shapes has {list(unfit[0])}: expected {expected}")


@dataclasses.dataclass(frozen=True)
class Train:
    """The length, the optimizer and the schedule of a run."""

    steps: int  # length of the run
    batch_tokens: int  # source plus target tokens of a batch, padding included
    learning_rate: float  # the peak, relative to the root mean square of each parameter
    warmup: int = 100  # steps of linear warm-up
    decay: float = 0.3  # the share of the run that decays linearly to 0
    clip: float = 1.0  # global norm to clip gradients to
    seed: int = 0  # seed of initialisation and data order
    evaluate_every: int = 250  # steps between held-out losses
    save_every: int = 250  # steps between checkpoints
    # a checkpoint to begin from, brought to the recipe's shape (`nets.resize`); empty: random
    start: str = ""
    # dtype of the computation, or "bfloat16"; parameters and optimizer are always float32
    dtype: str = "float32"
    # decay per step of the exponential moving average of the parameters that is evaluated and kept,
    # as 0.999; 0: none
    average: float = 0.0
    # share of the entries that each block adds to the residual stream, dropped in a step
    dropout: float = 0.0
    # "int8" or "int4": the loss is that of parameters rounded so, from the step on at which the
    # rate decays, for a checkpoint of that dtype; empty: no rounding
    stored: str = ""

    def __post_init__(self):
        at_least(1, steps=self.steps, batch_tokens=self.batch_tokens)
        in_range(0, 1, below=True, dropout=self.dropout, average=self.average)
        in_range(0, 2**32, below=True, seed=self.seed)  # those that a key tells apart
        one_of(self.stored or "int8", "stored", ("int8", "int4"))
        one_of(self.dtype, "dtype", ("float32", "bfloat16"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers:
    """The texts of the target's own that a drafter learns from."""

    # how many training inputs of each task the target answers, to learn on these answers alone;
    # empty: on the data
    answers: tuple[int, ...] = ()
    # each input is answered once at each of these; 0 is greedy
    temperatures: tuple[float, ...] = (0.0,)
    # with more than 1 the answers at temperature 0 are the best of a beam search of that width
    beams: int = 1
    texts: int = 0  # how often the data's own examples count beside the answers, in an epoch
    # tokens of a text that a decoder-only model, target or drafter, is given to continue
    prompt: int = 16

    def __post_init__(self):
        at_least(1, prompt=self.prompt, beams=self.beams)
        if self.beams > 1 and not (self.answers and 0.0 in self.temperatures):
            got = (
                f"beams is {self.beams}, answers {list(self.answers)} and temperatures "
                f"{list(self.temperatures)}"
            )
            raise ValueError(
                f"{got}: expected answers, and a temperature of 0, which beam search takes the "
                "place of"
            )


@dataclasses.dataclass(frozen=True)
class Distil(Answers):
    """Whom to learn from, besides the teacher's answers; see `training.distil`."""

    teacher: str  # a checkpoint: the target that the model will draft for
    # of the divergence from the teacher's distribution; the rest is the likelihood of the data. 0
    # spares the teacher's passes, most of the cost of a step: the choice for a small budget, with
    # answers
    weight: float = 1.0
    divergence: str = "kl"  # a name of `training.divergences.DIVERGENCES`
    # share of the rows of a batch whose text the drafter samples itself
    # (`training.distil.on_policy`)
    own: float = 0.0
    # how many tokens it drafts: its head is trimmed to the most frequent ones in the answers, or
    # else in the data; None: all
    draft_vocab: int | None = None
    # whether an encoder-decoder has its teacher's encoder and embedding, and learns the rest: as a
    # drafter it then reads what the target has made of a prompt (`drafters.share_encoder`)
    share_encoder: bool = False

    def __post_init__(self):
        super().__post_init__()
        one_of(self.divergence, "divergence", DIVERGENCES)
        in_range(0, 1, weight=self.weight, own=self.own)
        at_least(1, draft_vocab=1 if self.draft_vocab is None else self.draft_vocab)
        if self.own and self.weight < 1:
            reason = "own texts have no likelihood"
            raise ValueError(
                f"own is {self.own}: expected a weight of 1, not {self.weight}: {reason}"
            )


CURRICULA = ("rotating", "gradual")


@dataclasses.dataclass(frozen=True)
class EarlyExit:
    """The way a target learns to draft for itself with its first layers (LayerSkip); see
    `training.early_exit`.
    """

    scale: float = 0.2  # weight of the losses of early exits, the paper's e_scale
    # how often a row skips the last layer, the paper's p_max; earlier layers are skipped less
    dropout: float = 0.1
    # the choice of exits that learn in a step. "rotating": every `every`-th one, others in the next
    # step. "gradual": from the last to the first, one more from time to time, all after half of the
    # run
    curriculum: str = "rotating"
    every: int = 4  # with "rotating", each exit learns once in so many steps

    def __post_init__(self):
        one_of(self.curriculum, "curriculum", CURRICULA)
        in_range(0, 1, below=True, dropout=self.dropout)
        at_least(1, every=self.every)
        number(self.scale, "scale", "a number above 0", above=0)


@dataclasses.dataclass(frozen=True)
class Masks:
    """The way a draft model learns to fill in masks, for `drafters.parallel`; see
    `training.mask_filling`.
    """

    token: int  # the id of the mask token
    # draft tokens that a pass learns to make: the first without a mask, each other at one
    draft: int = 4
    decay: float = 0.8  # weight of each draft token over that before it
    # masks follow every `stride`-th token of a text; the first one changes from batch to batch
    stride: int = 4

    def __post_init__(self):
        at_least(0, token=self.token)
        at_least(2, draft=self.draft)
        at_least(1, stride=self.stride)
        in_range(0, 1, decay=self.decay)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A network and how it is made."""

    name: str
    model: Any  # its configuration
    # the tables of the file that describe it, as a model keeps them (`jaxspec.weights.source`)
    source: Any
    data: Data
    train: Train
    distil: Distil | None = None
    early_exit: EarlyExit | None = None
    masks: Masks | None = None

    @property
    def has_sources(self) -> bool:
        """Tells whether the model is an encoder-decoder, which learns tasks: its examples have
        sources.
        """
        return net_of(self.model).language_model(self.model).limits.start_token is not None

    def __post_init__(self):
        if not self.data.tokenizer:
            raise RecipeError(f"{self.name}: data lacks the key 'tokenizer'")
        check_data(self.data, self.has_sources)
        if self.distil is not None and self.distil.weight and self.train.dropout:
            dropped = (
                f"train.dropout is {self.train.dropout}, which would drop what the teacher "
                "computes, too"
            )
            raise RecipeError(
                f"{self.name}: {dropped}: expected 0 where a distribution is distilled"
            )
        if self.masks is not None:
            in_range(0, self.model.vocab_size, below=True, **{"masks.token": self.masks.token})
            if self.early_exit is not None:
                raise RecipeError(
                    f"{self.name}: got [masks] and [early_exit]: expected one of them"
                )
        if self.early_exit is None:
            return
        layers = decoder_layers(self.model)
        if layers < 3:
            raise RecipeError(
                f"{self.name}: early_exit in a model of {layers} layers: expected at least 3"
            )
        if self.distil is not None and self.distil.weight:
            weight = f"early_exit learns from texts, and distil.weight is {self.distil.weight}"
            raise RecipeError(
                f"{self.name}: {weight}: expected 0 (the teacher's answers may be the texts)"
            )


@dataclasses.dataclass(frozen=True)
class Learn(Answers):
    """The objective of a drafter that reads its target's hidden states; see
    `training.head_loss`.
    """

    # draft tokens that it learns to draft in a row; 0: as many as it has heads, or tokens of a
    # block
    depths: int = 0
    # weight of each draft token over that before it: 0.8 for EAGLE-3 and Medusa, 0.6 for MTP
    decay: float = 0.8
    # share of the steps, at the beginning, with the forward KL from the target's distribution
    kl: float = 0.5
    divergence: str = "blend"  # after these: a name of `training.divergences.DIVERGENCES`
    # weight of the distance from the target's hidden states of those that EAGLE-1 predicts
    regression: float = 0.0
    # weight of a kind's own lesson: the walk of DFlash 2 through its candidates, the estimate of a
    # confidence head (DSpark); nothing where a drafter has neither
    own: float = 1.0
    # whether DFlash 2's walk learns the target's most probable token alone, as `speculators` trains
    # it; otherwise it learns the target's distribution among the candidates
    hard: bool = False
    # whether a batch teaches one of the heads alone, drawn at random, without `decay` (blockwise
    # parallel decoding)
    one_head: bool = False
    # the target's learning rate, as a share of the heads': with more than 0 the target learns, too
    # (Medusa 2, blockwise fine-tuning), and what comes out is another target with its heads; 0
    # leaves it as it is
    target_rate: float = 0.0
    # share of the steps, at the beginning, in which the heads learn and the target does not
    heads_first: float = 0.0
    # weight of the heads' loss beside the target's own, by default that of Medusa 2; with
    # `one_head` both count alike
    heads_weight: float = 0.2
    # drafts begin at every `stride`-th position; the first one changes from batch to batch
    stride: int = 1
    chunk: int = 256  # positions of a batch, about, whose logits are in memory at once
    # those of `Answers`; samples unless the recipe says otherwise
    temperatures: tuple[float, ...] = dataclasses.field(default=(1.0,), kw_only=True)

    def __post_init__(self):
        super().__post_init__()
        one_of(self.divergence, "divergence", DIVERGENCES)
        at_least(1, stride=self.stride, chunk=self.chunk)
        at_least(0, own=self.own, regression=self.regression, heads_weight=self.heads_weight)
        in_range(
            0,
            1,
            decay=self.decay,
            kl=self.kl,
            target_rate=self.target_rate,
            heads_first=self.heads_first,
        )
        if self.heads_first and not self.target_rate:
            raise ValueError(
                f"heads_first is {self.heads_first} and target_rate is 0: set both, or neither"
            )


@dataclasses.dataclass(frozen=True)
class HeadRecipe:
    """A drafter that reads the hidden states of a target: the family is the name of one of
    `draft_heads.KINDS`.
    """

    name: str
    family: str
    target: str  # the source for `jaxspec.load`
    head: Any  # its sizes: what its kind takes (`draft_heads.KINDS`)
    data: Data  # the texts
    train: Train  # whose `start` is a folder that `jaxspec.load_drafter` takes
    learn: Learn = dataclasses.field(default_factory=Learn)  # the objective
    # what a target that translates between many reads, such as eng_Latn
    source_language: str | None = None
    target_language: str | None = None  # what it writes

    @property
    def training(self) -> Training:
        """The training of drafters of this family."""
        return TRAININGS[self.family]

    def __post_init__(self):
        for name in ("dropout", "stored"):
            value = getattr(self.train, name)
            if value:
                changed = (
                    f"train.{name} is {value!r}, which would change what the target computes, too"
                )
                raise RecipeError(
                    f"{self.name}: {changed}: leave it out where a drafter on hidden states learns"
                )
        if self.training.separate_heads:
            return
        for name in ("one_head", "target_rate"):
            value = getattr(self.learn, name)
            if value:
                family = f"family is {self.family!r} and learn.{name} is {value}"
                expected = "expected the family 'heads', which has a head for each draft token"
                raise RecipeError(f"{self.name}: {family}: {expected}")


@dataclasses.dataclass(frozen=True)
class NGramTexts:
    """The n-grams to count."""

    train: str  # JSON lines, relative to the data folder
    heldout: str  # texts whose share of right draft tokens is measured
    # the field with the text that a drafter continues: the output, where there is an input
    field: str = "text"
    tasks: tuple[str, ...] = ()  # the files' tasks to use; empty for all


@dataclasses.dataclass(frozen=True)
class NGramTables:
    """N-gram tables; see `drafters.ngram`."""

    # what `jaxspec.load` takes: drafted for; the tables take over its vocabulary and start token
    target: str
    order: int  # 1 for unigrams, 2 for bigrams, ...
    followers: int = 8  # tokens stored after each context
    least: int = 1  # contexts seen less often than this are left out
    # drafters that come first in a tree, as `jaxspec.load` takes them: the tables learn what these
    # miss of the texts, which the target has written (`training.boosting`)
    after: tuple[str, ...] = ()
    temperature: float = 1.0  # with `after`: the temperature at which the drafters will be judged

    def __post_init__(self):
        at_least(1, order=self.order, followers=self.followers, least=self.least)
        at_least(0, temperature=self.temperature)


@dataclasses.dataclass(frozen=True)
class TableRecipe:
    """N-gram tables and the texts that they count; the family is "ngram"."""

    name: str
    family: str
    data: NGramTexts
    tables: NGramTables


AnyRecipe = Recipe | TableRecipe | HeadRecipe


def shipped() -> dict[str, Path]:
    """The recipes that come with jaxspec, by name: the wheel's, or else the checkout's."""
    package = Path(__file__).resolve().parents[1]
    recipes: dict[str, Path] = {}
    for folder in (package / "data" / "recipes", package.parent / "models"):
        for path in sorted(folder.glob("*.toml")):
            recipes.setdefault(path.stem, path)
    return recipes


def load(path: str | Path) -> AnyRecipe:
    """Reads a recipe: a file, or one that comes with jaxspec, by its name.

    Raises:
        FileNotFoundError: the recipe does not exist.
        RecipeError: it is not TOML, or has an unknown, missing or ill-typed key.
    """
    path = Path(path)
    recipes = shipped()
    if not path.is_file():
        if str(path) not in recipes:
            advice = (
                suggest(str(path), recipes)
                or f": expected a .toml file, or one of {', '.join(recipes)}"
            )
            raise FileNotFoundError(f"no recipe {str(path)!r}{advice}")
        path = recipes[str(path)]
    text = read_text(path)
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise RecipeError(f"{path} is not valid TOML: {error}") from error
    return parse(table, str(path))


def parse(table: dict[str, Any], where: str = "recipe") -> AnyRecipe:
    """Makes a recipe from the tables of its TOML file. A network's has [model], which is its
    config.json; any other recipe names its family.
    """
    family = table.get("family")
    table = dict(table)
    if "model" in table:
        recipe = Recipe
        parts = {
            "data": Data,
            "train": Train,
            "distil": Distil,
            "early_exit": EarlyExit,
            "masks": Masks,
        }
        table |= _network(table, where)
    elif family in HEADS:
        recipe = HeadRecipe
        parts = {"head": HEADS[family], "data": Data, "train": Train, "learn": Learn}
    elif family == "ngram":
        recipe = TableRecipe
        parts = {"data": NGramTexts, "tables": NGramTables}
    else:
        raise RecipeError(
            f"{where}: family is {family!r}: expected one of {sorted([*HEADS, 'ngram'])}, or a "
            "table [model] with a network's config.json"
        )
    written = dict(table)
    for key in (key for key in parts if key in table):
        table[key] = build(parts[key], table[key], f"{where}: [{key}]")
    parsed = build(recipe, table, where)
    unused_keys.check(parsed, written, where)
    return parsed


def _network(table: dict[str, Any], where: str) -> dict[str, Any]:
    """Takes the tables of a network out of a recipe's, and returns the fields of `Recipe` for
    them.
    """
    if "family" in table:
        raise RecipeError(
            f"{where}: family is {table['family']!r}: leave it out, since [model] has the "
            "network's model_type"
        )
    if not isinstance(table["model"], dict) or "model_type" not in table["model"]:
        raise RecipeError(
            f"{where}: [model] lacks the key 'model_type': expected a config.json's keys, such as "
            'model_type = "t5" and d_model = 384'
        )
    try:
        tables, config = source.from_toml(table)
        unread = list(source.unread(tables))
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from error
    except source.ERRORS as error:
        raise RecipeError(f"{where}: [model] cannot be used: {source.reason(error)}") from error
    if unread:
        family = hf_families.of(dict(tables[source.CONFIG]))
        raise RecipeError(
            f"{where}: [model] has the key {unread[0]!r}, which {family.title} does not read"
            f"{suggest(unread[0], family.keys)}"
        )
    return {"model": config, "source": tables}
