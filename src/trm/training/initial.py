"""What a new run starts from where a recipe wants more than random weights.

This happens once, before the first step; the checkpoint of step 0 contains the result.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from macbook_optimization.checkpoint_management import Warn
from macbook_optimization.errors import CheckpointError, ConfigError
from macbook_optimization.units import counted
from trm.backends.base import Learner
from trm.config import RunConfig
from trm.exchange import weights_of_run
from trm.feed import Feed
from trm.tasks.base import HasVocabulary, HasWordVectors

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
    task = cast(HasWordVectors, feed.task)  # which the feed has checked
    tokens, vectors = task.word_vectors(feed.split, feed.config.model.hidden_size)
    learner.set_embeddings(tokens, vectors)
    known = counted(len(tokens), "token")
    return f"The embeddings of {known} of {feed.split.spec.vocab_size:,} start from co-occurrence"


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
