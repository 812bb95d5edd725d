"""`trm predict` of a language model: text that continues a prompt, printed as it is sampled."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from macbook_optimization.errors import DataError
from trm.cli.common import Command, echo, set_environment, show, showing, with_options

if TYPE_CHECKING:
    from trm.inference.predict import TrainedModel
    from trm.tasks.base import Generative

MAX_PROMPT_BYTES = 1 << 24
NAMES = ("max_tokens", "temperature", "top_p", "seed")


def sampling_options(command: Command) -> Command:
    """Add the options of models that write text."""
    options = (
        click.option(
            "--max-tokens", type=click.IntRange(1, 10_000_000), help="Text: tokens to write [default: 200]."
        ),
        click.option(
            "--temperature", type=click.FloatRange(0, 100),
            help="Text: divide the logits by this; 0 always takes the likeliest token [default: 0.8].",
        ),
        click.option(
            "--top-p", type=click.FloatRange(0, 1, min_open=True),
            help="Text: draw from the likeliest tokens that have this share of the probability "
            "[default: 1, all].",
        ),
        click.option("--seed", type=click.IntRange(0, 2**63 - 1), help="Text: seed [default: 0]."),
    )  # fmt: skip
    return with_options(command, options)


def refuse_options(options: Mapping[str, Any], reason: str) -> None:
    """Raise a usage error if one of these options was given."""
    given = [name for name, value in options.items() if value not in (None, False)]
    if given:
        raise click.UsageError(f"--{given[0].replace('_', '-')} {reason}.")


def write_text(
    model: TrainedModel, task: Generative, prompt: str, dataset: Path | None, options: Any, as_json: bool
) -> None:
    """Continue a prompt; - reads it from standard input."""
    from trm.inference.sampling import SamplingSettings, load_language_model, sample
    from trm.tasks.documents.text import encode_prompt
    from trm.tasks.documents.text_tokens import decoded

    text = _standard_input() if prompt == "-" else prompt
    tokenizer = task.tokenizer(dataset or model.config.data.path)
    tokens = encode_prompt(tokenizer, text)
    settings = SamplingSettings(**{name: value for name, value in options.items() if value is not None})
    set_environment(model.execution.threads)
    with showing(f"Loading {model.execution.library}"):
        language_model = load_language_model(model)
    pieces = decoded(tokenizer, sample(language_model, tokens, settings))
    if as_json:
        facts = {"prompt": text, "text": "".join(pieces), "checkpoint": model.checkpoint.path.name}
        show(facts, True, "")
        return
    echo(text, newline=False)
    for piece in pieces:
        echo(piece, newline=False)
        sys.stdout.flush()
    echo("")


def _standard_input() -> str:
    content = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(content) > MAX_PROMPT_BYTES:
        raise DataError(f"The prompt on standard input is longer than {MAX_PROMPT_BYTES:,} bytes")
    return content.decode(errors="replace")
