"""The model card of an exported mail model: what it is, how good it was, and what it reveals."""

from __future__ import annotations

import numpy as np

from macbook_optimization.units import MIB
from trm.mail.model import MailModel
from trm.mail.report import use_of

_BUDGETS = (0.005, 0.01, 0.02, 0.05)

_CARD = """# Mail classifier

Sorts mail into {categories}. Trained with macbook-trm on {documents:,} messages.

## Use

```python
import trm

model = trm.load_mail("PATH OF THIS DIRECTORY")
decision = model.classify(open("message.eml", "rb").read())
```

`trm email classify DIRECTORY MAIL` does the same on the command line. Nothing opens a network connection.

## Measured

{measured}

Share of messages that are decided (the others are "unsure") if at most this share of the decisions may be
wrong, on messages that the model had not seen before it was calibrated on them:

| errors allowed | decided |
|---|---|
{budgets}

## Paths

{paths}

## What it reveals

The directory contains no message. `vocabulary.txt` lists {features:,} n-grams that each occurred in at least
{least} training messages{tokenizer}.
Names, companies, domains and phrases that several messages share can be read there, and their weights say for
which category they speak. `trm email export --min-df N` removes n-grams of fewer than N messages, and
`trm email train --min-df N` keeps rarer domains and header words out of the tokenizer, too. A word that one
message repeats may still be in the tokenizer.

## Limits

- It is as good as its training mail: other people's mail, other languages and later years look different.
- Confidence is calibrated on mail like the training mail. Where mail changes with time, it is overconfident.
- Files: {files}.
"""

_CHANGED = """

These numbers, and the shares below, were measured before the export, which removed n-grams or changed
weights:
`trm email eval DIRECTORY MAIL` measures this directory."""
_TOKENIZER = ", and `tokenizer.json` pieces of words, domains and header words"


def model_card(model: MailModel, sizes: dict[str, int], *, is_changed: bool) -> str:
    """`is_changed`: the export left something out, so the numbers are those of the model before it."""
    facts = model.facts
    network = model.network
    least = _least_documents(model)
    return _CARD.format(
        categories=", ".join(model.categories),
        documents=int(facts["documents"]),
        measured=_measured(model) + (_CHANGED if is_changed else ""),
        budgets="\n".join(f"| {each:.1%} | {_decided(model, each)} |" for each in _BUDGETS),
        paths=_paths(model),
        features=len(model.vocabulary.columns),
        least=least,
        tokenizer="" if network is None else _TOKENIZER,
        files=", ".join(f"{name} {size / MIB:.1f} MiB" for name, size in sorted(sizes.items())),
    )


def _least_documents(model: MailModel) -> int:
    idf = model.vocabulary.idf.astype(np.float64)
    if not len(idf):
        return 0
    return round(float((1 + int(model.facts["documents"])) / np.exp(idf.max() - 1) - 1))


def _measured(model: MailModel) -> str:
    held_out = model.facts.get("report", {}).get("held_out")
    if held_out is None:
        found = model.facts["cross_validation"]
        return (
            f"In cross-validation on the training messages, linear path: accuracy {found['accuracy']:.4f}, "
            f"macro-F1 {found['macro_f1']:.4f}, calibration error {found['calibration_error']:.4f}."
        )
    rows = "\n".join(
        f"| {name} | {column['accuracy']:.4f} | {column['macro_f1']:.4f} |"
        for name, column in held_out["columns"].items()
    )
    return (
        f"On {held_out['messages']:,} messages that were held out:\n\n"
        "| | accuracy | macro-F1 |\n|---|---|---|\n"
        f"{rows}\n\nCalibration error {held_out['calibration_error']:.4f}."
    )


def _decided(model: MailModel, budget: float) -> str:
    curve = model.curve
    threshold = curve.threshold(budget)
    found = [share for each, share in zip(curve.confidences, curve.decided, strict=True) if each >= threshold]
    return f"{max(found):.1%}" if found else "none"


def _paths(model: MailModel) -> str:
    linear = f"Linear path: TF-IDF n-grams, {' + '.join(model.parts)}."
    network = model.network
    if network is None:
        return linear
    shape = network.config.model
    sizes = f"{shape.num_layers} layers of width {shape.hidden_size}, at most {network.length} tokens"
    return f"{linear} Recursive path: {sizes}; {use_of(model.mixture.gate)}."
