import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
pytest.importorskip("sklearn", reason="training on mail needs scikit-learn")

from letters import LENGTH, TOPICS, letter, write_mailbox
from tiny import Recorder, make_learner, run_config

from trm.config import ModelConfig
from trm.mail.mixing import Mixture
from trm.mail.model import load_model, save_model
from trm.mail.network import TOKENIZER_FILE, WEIGHTS_FILE, Network
from trm.mail.training import MailOptions, train_mail
from trm.runs.directory import MAIL
from trm.tasks.base import DataSpec
from trm.tasks.documents.mail import parse_mail
from trm.tasks.documents.tokens import MailTokenizer


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Return the run of a model of three categories, and its report."""
    directory = tmp_path_factory.mktemp("mail")
    mailbox = write_mailbox(directory / "mailbox")
    _, report = train_mail([mailbox], directory / "run", MailOptions(), Recorder())
    return directory / "run", report


@pytest.fixture(scope="session")
def untrained(trained, tmp_path_factory):
    """Return a run with a network of random weights, which both paths use in equal parts."""
    from safetensors.torch import save

    mails = [parse_mail(letter(category, number)) for category in TOPICS for number in range(10)]
    tokenizer = MailTokenizer.train(mails, 200)
    spec = DataSpec(LENGTH, 200, 3, class_names=tuple(sorted(TOPICS)))
    model = ModelConfig(variant="transformer", hidden_size=16, num_heads=2, H_layers=1, width_multiple=4)
    config = run_config("nothing", task="email", model=model.model_dump(), inference={"depth": 1})
    learner = make_learner(model, config.training, spec, seed=3)
    network = Network(
        config.model_dump(mode="json"),
        {name: value for name, value in asdict(spec).items() if name != "layout"},
        {WEIGHTS_FILE: save(learner.state()["weights"]), TOKENIZER_FILE: tokenizer.to_json().encode()},
    )
    run = shutil.copytree(trained[0], tmp_path_factory.mktemp("network") / "run")
    mixture = Mixture(gate=1.0, certain=1.0)
    save_model(replace(load_model(run / MAIL), network=network, mixture=mixture), run / MAIL)
    return run
