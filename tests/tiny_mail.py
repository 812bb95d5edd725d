"""Made-up mail, a dataset of it, and a recipe that learns it in a second."""

import numpy as np
from tiny import model_config, run_config, training_config

from trm.tasks.documents.collecting import Document, Documents
from trm.tasks.documents.email import write_documents
from trm.tasks.documents.mail import Mail
from trm.tasks.documents.masked import masked_form
from trm.tasks.documents.tokens import TokenOptions
from trm.tasks.documents.writing import write_mail

OPTIONS = TokenOptions(length=48, vocab_size=300)
WORDS = {
    "spam": ["cheap", "watches", "buy", "now", "offer", "money", "winner", "prize", "free"],
    "work": ["meeting", "report", "project", "deadline", "review", "budget", "team"],
    "home": ["dinner", "weekend", "mother", "garden", "football", "party", "holiday"],
}


def documents(count, seed):
    """Return mails of words that mostly belong to their category; a third are spam, ten in a hundred home."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        category = str(rng.choice(list(WORDS), p=[0.3, 0.6, 0.1]))
        size = int(rng.integers(2, 40))
        own, any_word = WORDS[category], [word for words in WORDS.values() for word in words]
        text = " ".join(str(rng.choice(own if rng.random() < 0.6 else any_word)) for _ in range(size))
        made.append(Document(Mail("parsed", subject=own[0], text=text), category))
    return made


def email_dataset(directory, train=120, test=40):
    made = Documents(documents(train, 0), documents(test, 1), tuple(WORDS))
    write_documents(made, directory, OPTIONS)
    return directory


def masked_dataset(directory, of):
    """Write the same messages with masked tokens, in the vocabulary of the dataset `of`."""
    made = Documents(documents(120, 0), documents(40, 1), ("",))
    options = TokenOptions(length=48, tokenizer=str(of))
    write_mail(made, masked_form(0), directory, options, lambda *facts: None)
    return directory


def email_config(dataset, **changes):
    model = model_config(hidden_size=32, num_heads=4, L_cycles=1, H_cycles=1)
    training = {"effective_batch_size": 16, "max_steps": 60, "supervision": "terminal", "ema_rate": 0.9}
    training |= {"loss": "softmax_cross_entropy", "optimizer": "adamw", "learning_rate": 3e-3}
    sections = {
        "task": "email",
        "model": model.model_dump(),
        "training": training_config(**training).model_dump(),
        "inference": {"depth": 1},
    }
    return run_config(dataset, **{**sections, **changes})


def folders_of_mail(directory, count=40):
    """Write messages as files, in a folder for each category."""
    for number, document in enumerate(documents(count, 0)):
        folder = directory / document.category
        folder.mkdir(parents=True, exist_ok=True)
        text = f"Subject: {document.mail.subject}\n\n{document.mail.text} {number}\n"
        (folder / f"{number}.eml").write_text(text)
    return directory
