"""Use a mail model from Python: `trm.load_mail(PATH).classify(message)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from macbook_optimization.errors import DataError
from trm.mail.corrections import apply_corrections, load_corrections
from trm.mail.model import DEFAULT_MAX_ERROR, DESCRIPTION_FILE, Decision, MailModel, load_model
from trm.mail.reading import features_of
from trm.runs.directory import MAIL


def model_directory(path: Path) -> Path:
    """Return the directory of a model: an exported one itself, or that of a run."""
    return path if (path / DESCRIPTION_FILE).exists() else path / MAIL


@dataclass(frozen=True, slots=True)
class MailClassifier:
    """A mail model in memory. Messages are parsed in this process, within the bounds of the parser."""

    model: MailModel

    def classify(self, message: bytes, max_error: float = DEFAULT_MAX_ERROR) -> Decision:
        """Decide about one message; raise `DataError` if it cannot be read."""
        return self.classify_all([message], max_error)[0]

    def classify_all(self, messages: Sequence[bytes], max_error: float = DEFAULT_MAX_ERROR) -> list[Decision]:
        features = [features_of(message, self.model.num_tokens) for message in messages]
        for number, each in enumerate(features, start=1):
            if each.mail.verdict == "skipped":
                raise DataError(f"Message {number} cannot be classified: {each.mail.reason}")
        return self.model.decide(features, max_error)


def load_mail(path: str | Path) -> MailClassifier:
    """Load a mail model from a run or from an exported directory, with what it learned from corrections."""
    directory = model_directory(Path(path))
    model = load_model(directory)
    corrections = load_corrections(directory, len(model.vocabulary.idf))
    return MailClassifier(apply_corrections(model, corrections))
