"""The start of a new run where a recipe wants more than random weights.

This happens once, before the first step; the checkpoint of step 0 contains the result.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import cast

import numpy as np

from macbook_optimization.checkpoint_management import Warn
from macbook_optimization.children import ChildDied, Send, run_in_child
from macbook_optimization.errors import CheckpointError, ConfigError, MemoryBudgetError, RunError
from macbook_optimization.json_types import JsonObject
from macbook_optimization.units import counted
from trm.arrays import Float32Array, IntArray
from trm.backends.base import Learner
from trm.config import RunConfig
from trm.exchange import weights_of_run
from trm.feed import Feed
from trm.tasks.base import HasVocabulary, HasWordVectors
from trm.tasks.dataset import open_split
from trm.tasks.registry import load_task

_EMBEDDINGS = "embed_tokens."
_BODY = (_EMBEDDINGS, "L_level.", "layers.")  # without any of these, nothing that was learned would be taken


def initialise(learner: Learner, feed: Feed, warn: Warn) -> str | None:
    """Set the initial weights of a recipe and describe them; return None if all of them are random.

    `warn` receives why the weights of another run are not its best ones.
    """
    training = feed.config.training
    if training.initial_weights is not None:
        return _take_weights(learner, feed, training.initial_weights, warn)
    if training.initial_embeddings == "cooccurrence":
        return _set_word_vectors(learner, feed)
    return None


def _set_word_vectors(learner: Learner, feed: Feed) -> str:
    tokens, vectors = _word_vectors(feed)
    learner.set_embeddings(tokens, vectors)
    known = counted(len(tokens), "token")
    return f"The embeddings of {known} of {feed.split.spec.vocab_size:,} start from co-occurrence"


def _word_vectors(feed: Feed) -> tuple[IntArray, Float32Array]:
    """Compute the vectors in a child process, which returns its memory to the system before the first step.

    In this process it would stay in the heap, and small micro-batches would never need as much again.
    """
    width = feed.config.model.hidden_size
    arguments = {"task": feed.config.task, "dataset": str(feed.config.data.path), "width": width}
    try:
        found: JsonObject = run_in_child(f"{__name__}:word_vectors_in_child", arguments)
    except ChildDied as death:
        if death.may_be_out_of_memory:
            raise MemoryBudgetError(
                f"There is too little memory to count which words occur together: the process {death}.",
                hint="Close other programs, or start from random ones: training.initial_embeddings=random",
            ) from death
        raise RunError(f"The computation of word vectors {death}.", hint="This is a bug.") from death
    vectors = np.frombuffer(base64.b64decode(found["vectors"]), dtype=np.float32).reshape(-1, width)
    return np.array(found["tokens"], dtype=np.int64), vectors.copy()


def word_vectors_in_child(task: str, dataset: str, width: int, send: Send) -> JsonObject:
    """Return tokens, and the bytes of their float32 vectors. The trainer has verified the data."""
    with_words = cast(HasWordVectors, load_task(task))  # which the feed has checked
    tokens, vectors = with_words.word_vectors(open_split(Path(dataset), "train", verified={}), width)
    return {"tokens": tokens.tolist(), "vectors": base64.b64encode(vectors.tobytes()).decode("ascii")}


def _take_weights(learner: Learner, feed: Feed, path: Path, warn: Warn) -> str:
    """Take every tensor of the other run that has the name and the shape of one of ours."""
    source, theirs = weights_of_run(path, warn)
    groups = learner.state()
    ours = groups["weights"]
    taken = {name for name, tensor in ours.items() if name in theirs and theirs[name].shape == tensor.shape}
    if not any(name.startswith(_BODY) for name in taken):
        raise CheckpointError(
            f"No embedding and no layer of {path} has the shape that the recipe needs",
            hint="Use the model section of that run's recipe, or another training.initial_weights.",
        )
    if any(name.startswith(_EMBEDDINGS) for name in taken):
        _require_same_words(feed, path, source)
    weights = {name: theirs[name] if name in taken else tensor for name, tensor in ours.items()}
    learner.load_state({**groups, "weights": weights, **({"ema": weights} if "ema" in groups else {})})
    drawn = _parts(set(ours) - taken)
    return f"Starting from {path}: {_parts(taken)}" + (f"; drawn at random: {drawn}" if drawn else "")


def _require_same_words(feed: Feed, path: Path, source: RunConfig) -> None:
    """Compare the vocabularies, unless the dataset of the other run is not there any more."""
    if not isinstance(feed.task, HasVocabulary):
        return
    ours, theirs = (feed.task.vocabulary(config.data.path) for config in (feed.config, source))
    if theirs is not None and ours != theirs:
        raise ConfigError(
            f"{feed.config.data.path} has another vocabulary than {source.data.path}, the dataset of {path}: "
            "the same token is another word",
            hint=f"Build it with the option `tokenizer: {source.data.path}` (--tokenizer).",
        )


def _parts(names: set[str]) -> str:
    """Return the modules that tensors belong to."""
    return ", ".join(sorted({name.partition(".")[0] for name in names}))
