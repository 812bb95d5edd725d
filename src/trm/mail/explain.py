"""The words and fields that drove a decision.

The linear score of a category is a sum over the n-grams of a message, so each n-gram has an exact share: its
weight times the difference between the table's columns for the category and for the next best one.
"""

from __future__ import annotations

import html
from dataclasses import dataclass

import numpy as np

from trm.arrays import FloatArray
from trm.mail.model import Decision, MailModel
from trm.mail.page import page
from trm.mail.reading import Features

_FIELDS = {"S": "subject", "H": "header", "L": "link", "A": "attachment"}


@dataclass(frozen=True, slots=True)
class Reason:
    """An n-gram, where it was found, and by how much it moved the score towards the category."""

    text: str
    field: str
    share: float


def explain(model: MailModel, features: Features, count: int = 12) -> tuple[str, list[Reason]]:
    """Return the rival category, and what had the largest shares for and against the decision.

    Shares are in units of the linear scores. What the recursive path added is one share of its own: it reads
    the tokens in their order, and cannot be divided among them. The last share is that of all other n-grams,
    so that the shares add up to the distance between the two categories.
    """
    bags = model.bags([features.counts])
    added = np.zeros(len(model.categories))
    if len(model.mixture.needs_recursion(np.exp(model.linear(bags)))):
        added = model.recursive_scores([features.mail])[0]
    scores = model.table.scores(bags)[0]
    order = np.argsort(-(scores + added), kind="stable")
    best = int(order[0])
    rival = int(order[1])
    columns = bags.indices
    difference = model.table.weights[columns, best] - model.table.weights[columns, rival]
    shares: FloatArray = difference.astype(np.float64) * bags.weights
    largest = np.argsort(-np.abs(shares), kind="stable")[:count]
    names = _names(model)
    reasons = [_reason(names[columns[i]], float(shares[i])) for i in largest]
    if added.any():
        reasons.append(
            Reason("all tokens in their order", "recursive path", float(added[best] - added[rival]))
        )
        reasons.sort(key=lambda reason: -abs(reason.share))
    others = float(scores[best] - scores[rival]) - float(shares[largest].sum())
    num_others = len(shares) - len(largest)
    constant = "the constant of the category"
    text = f"{num_others:,} more n-grams and {constant}" if num_others else constant
    return model.categories[rival], [*reasons, Reason(text, "the rest", others)]


def _names(model: MailModel) -> list[str]:
    return list(model.vocabulary.columns)


def _reason(name: str, share: float) -> Reason:
    prefix, colon, rest = name.partition(":")
    if colon and prefix in _FIELDS:
        return Reason(rest, _FIELDS[prefix], share)
    return Reason(name, "text", share)


def as_text(decision: Decision, rival: str, reasons: list[Reason]) -> str:
    unsure = ", unsure" if decision.unsure else ""
    lines = [f"{decision.category} ({decision.confidence:.1%}{unsure}) rather than {rival}:"]
    widest = max((abs(reason.share) for reason in reasons), default=1.0) or 1.0
    for reason in reasons:
        bar = "#" * max(1, round(20 * abs(reason.share) / widest))
        sign = "for" if reason.share > 0 else "against"
        lines.append(f"  {reason.share:+7.3f}  {bar:20}  {sign:7}  {reason.field}: {reason.text}")
    return "\n".join(lines)


def as_html(title: str, decision: Decision, rival: str, reasons: list[Reason]) -> str:
    """Return a page without scripts or links to anything: the words come from hostile mail."""
    widest = max((abs(reason.share) for reason in reasons), default=1.0) or 1.0
    rows = "\n".join(
        f'<tr><td>{reason.share:+.3f}</td><td><div class="{"for" if reason.share > 0 else "against"}" '
        f'style="width:{100 * abs(reason.share) / widest:.0f}%"></div></td>'
        f"<td>{html.escape(reason.field)}</td><td>{html.escape(reason.text)}</td></tr>"
        for reason in reasons
    )
    unsure = " (unsure)" if decision.unsure else ""
    body = _BODY.format(
        title=html.escape(title),
        category=html.escape(decision.category) + unsure,
        confidence=f"{decision.confidence:.1%}",
        rival=html.escape(rival),
        rows=rows,
    )
    return page(title, body, _STYLE)


_STYLE = """
table { border-collapse: collapse; width: 100%; }
td { border-top: 1px solid #8884; padding: .25rem .5rem; overflow-wrap: anywhere; }
td:nth-child(2) { width: 30%; }
div.for { background: #2a7; height: .8rem; }
div.against { background: #c54; height: .8rem; }
"""
_BODY = """<h1>{category}</h1>
<p>{title}: {confidence} confident, rather than {rival}. Green n-grams speak for the decision, red ones
against.</p>
<table>
{rows}
</table>"""
