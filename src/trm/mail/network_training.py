"""Train the recursive path of a mail model, as a run of its own, and add it to the linear path.

A part of the training set is kept from the network. On it, where the linear scores come from cross-validation
and so are unseen as well, the two paths are mixed and calibrated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from macbook_optimization.errors import ConfigError, RunError
from trm.arrays import BoolArray, Float32Array, IntArray
from trm.config import RunConfig, load_config
from trm.display import Display
from trm.mail.calibration import fit_error_curve, log_softmax, softmax
from trm.mail.mixing import fit_mixture
from trm.mail.model import MailModel
from trm.mail.network import Network, weights_file
from trm.reports.monitor import train_monitored
from trm.runs.directory import DATASET, Run, only_trainer
from trm.runs.saved_state import check_compatible
from trm.tasks.dataset import open_split
from trm.tasks.documents.collecting import Document, Documents
from trm.tasks.documents.email import write_documents
from trm.tasks.documents.linear import class_weights
from trm.tasks.documents.mail import Mail
from trm.tasks.documents.tokens import FILE_NAME as TOKENIZER_FILE
from trm.tasks.documents.tokens import TokenOptions
from trm.training.loop import Limits
from trm.training.preparation import prepare

MEMBERS = "ensemble"  # in the run directory: the runs of all networks but the first
VALIDATION_SHARE = 0.15
MIN_MESSAGES = 200  # below, there is too little to mix the paths on
NUM_EPOCHS = 8
MAX_STEPS = 2000  # about ten minutes on two cores; the fastest corpora have converged long before
_MIN_STEPS = 200
_NUM_EVALUATIONS = 5

Profile = Literal["compact", "8gb", "16gb", "32gb"]
# Hidden size, tokens per message. `compact` is the recipe's own size, which two cores train in minutes.
PROFILES: dict[Profile, tuple[int, int] | None] = {
    "compact": None,
    "8gb": (256, 256),
    "16gb": (384, 512),
    "32gb": (512, 768),
}


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """Options of the recursive path."""

    recipe: str = "email"
    profile: Profile = "compact"
    overrides: tuple[str, ...] = ()  # key=value, as for `trm train`
    seed: int = 0
    num_members: int = 1  # networks whose probabilities are averaged

    def tokens(self, min_documents: int) -> TokenOptions:
        sizes = PROFILES[self.profile]
        given = {} if sizes is None else {"length": sizes[1]}
        return TokenOptions(min_df=min_documents, **given)

    def config(self, run: Path, num_messages: int, member: int = 0) -> RunConfig:
        """Return the recipe of one network, with as many steps as this many training messages need."""
        fixed = [each for each in self.overrides if re.match(r"(seed|task|data(\.\w+)*)\s*=", each)]
        if fixed:
            raise ConfigError(
                f"{', '.join(fixed)} cannot be set: the mail decides about task and data",
                hint="--seed sets the seed.",
            )
        batch_size = self._load(run, member, MAX_STEPS).training.effective_batch_size
        steps = num_messages * NUM_EPOCHS // batch_size
        return self._load(run, member, min(MAX_STEPS, max(_MIN_STEPS, steps)))

    def _load(self, run: Path, member: int, steps: int) -> RunConfig:
        sizes = PROFILES[self.profile]
        chosen = [
            f"seed={self.seed + member}",
            f"data.path={json.dumps(str(run / DATASET))}",
            f"training.max_steps={steps}",
            f"training.warmup_steps={steps // 16}",
            f"evaluation.every_steps={-(-steps // _NUM_EVALUATIONS)}",
            *([] if sizes is None else [f"model.hidden_size={sizes[0]}"]),
        ]
        return load_config(self.recipe, [*chosen, *self.overrides])


@dataclass(frozen=True, slots=True)
class Labelled:
    """The messages of the training set, with the out-of-fold scores of the linear path."""

    mails: Sequence[Mail]
    min_documents: int  # that have a word, for it to be in a vocabulary
    labels: IntArray
    unseen_scores: Float32Array
    is_validation: BoolArray


def add_network(
    model: MailModel, given: Labelled, locked: tuple[Path, int], options: NetworkOptions, display: Display
) -> MailModel:
    """Train the networks, and return the model with both paths, mixed and calibrated.

    `locked` is the run directory with the descriptor of its lock.
    """
    run, lock = locked
    tokens = options.tokens(given.min_documents)
    num_messages = int((~given.is_validation).sum())
    runs = [run if member == 0 else run / MEMBERS / str(member) for member in range(options.num_members)]
    for member, own in enumerate(runs):
        if member:
            display.message(f"Training network {member + 1} of {len(runs)}.")
        if not member:
            _write_dataset(model.categories, given, run, tokens, display)
        config = options.config(run, num_messages, member)
        with nullcontext(lock) if not member else only_trainer(own) as held:
            outcome = train_monitored(prepare(config, own, display), Limits(), held)
        if outcome.reason == "interrupted":
            raise KeyboardInterrupt
    display.status("Mixing the two paths")
    return mixed(replace(model, network=load_network(runs)), given)


def _write_dataset(
    categories: tuple[str, ...], given: Labelled, run: Path, tokens: TokenOptions, display: Display
) -> None:
    """Write the tokens; an earlier start of this run may have done so, with the same messages."""
    documents = [
        Document(mail, categories[label]) for mail, label in zip(given.mails, given.labels, strict=True)
    ]
    chosen = given.is_validation.tolist()
    train = [each for each, held in zip(documents, chosen, strict=True) if not held]
    test = [each for each, held in zip(documents, chosen, strict=True) if held]
    directory = run / DATASET
    if not directory.exists():
        write_documents(Documents(train, test, categories), directory, tokens, display.update)
        return
    sizes = [len(open_split(directory, name)) for name in ("train", "test")]
    if sizes != [len(train), len(test)]:
        raise RunError(
            f"{run} was begun with other mail: {sizes[0]} + {sizes[1]} messages instead of "
            f"{len(train)} + {len(test)}",
            hint="Choose another --run directory.",
        )


def load_network(runs: Sequence[Path]) -> Network:
    """Take the newest checkpoints: the best ones were chosen on the messages that the paths are mixed on."""
    from safetensors.numpy import save

    files = {}
    for member, run in enumerate(runs):
        checkpoint = Run(run).checkpoints().newest_intact()
        if checkpoint is None:
            raise RunError(f"{run} has no checkpoint", hint="Start the same command again.")
        ema = Run(run).config.training.ema
        files[weights_file(member)] = save(checkpoint.load("ema" if ema else "weights", "numpy"))
        spec = check_compatible(checkpoint, Run(run).config).spec.model_dump(mode="json")
    files[TOKENIZER_FILE] = (runs[0] / DATASET / TOKENIZER_FILE).read_bytes()
    return Network(Run(runs[0]).config.model_dump(mode="json"), spec, files)


def mixed(model: MailModel, given: Labelled) -> MailModel:
    """Choose the mixture, and what follows from it, on the messages that were kept from the network."""
    assert model.network is not None
    rows = np.flatnonzero(given.is_validation)
    labels = given.labels[rows]
    linear = log_softmax(given.unseen_scores[rows], model.temperature)
    recursive = model.network.log_probabilities([given.mails[row] for row in rows.tolist()])
    weights = class_weights(labels, len(model.categories), float(model.facts["class_weight_exponent"]))
    mixture = fit_mixture(linear, recursive, labels, weights)
    accuracy = {
        "linear": float((linear.argmax(1) == labels).mean()),
        "recursive": float((recursive.argmax(1) == labels).mean()),
    }
    curve = model.curve
    if mixture.gate:
        probabilities = softmax(given.unseen_scores[rows], model.temperature)
        unsure = mixture.needs_recursion(probabilities)
        probabilities[unsure] = mixture.together(linear[unsure], recursive[unsure])
        accuracy["together"] = float((probabilities.argmax(1) == labels).mean())
        curve = fit_error_curve(probabilities, labels)
    facts = {**model.facts, "mixture": {"messages": len(rows), "accuracy": accuracy}}
    return replace(model, mixture=mixture, curve=curve, facts=facts)
