import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.importorskip("sklearn", reason="training on mail needs scikit-learn")

from letters import write_mailbox
from tiny import Recorder

from trm.mail.training import MailOptions, train_mail


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Return the run of a model of three categories, and its report."""
    directory = tmp_path_factory.mktemp("mail")
    mailbox = write_mailbox(directory / "mailbox")
    _, report = train_mail([mailbox], directory / "run", MailOptions(), Recorder())
    return directory / "run", report
