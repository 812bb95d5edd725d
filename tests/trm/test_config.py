"""Recipes: what they may say, and what a user is told who says something else."""

import re

import pytest
import yaml

from macbook_optimization.errors import ConfigError
from trm.config import (
    CurriculumConfig,
    RunConfig,
    Section,
    config_from_text,
    differences,
    find_recipe,
    load_config,
    shipped_recipes,
)
from trm.tasks import load_task
from trm.tasks.sudoku import BuildOptions

MINIMAL = "task: sudoku\ndata: {path: somewhere}\n"


def problems_of(text, *overrides):
    with pytest.raises(ConfigError) as caught:
        config_from_text(text, "recipe.yaml", overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_is_valid(name):
    assert isinstance(load_config(name), RunConfig)


def test_a_recipe_survives_being_written_and_read():
    config = load_config("sudoku-6x6")
    assert config_from_text(config.to_yaml(), "again") == config


def test_an_unknown_key_gets_a_suggestion():
    assert "did you mean hidden_size?" in problems_of(MINIMAL, "model.hiden_size=256")


def test_a_key_in_the_wrong_place_is_sent_to_its_section():
    assert "did you mean training.learning_rate?" in problems_of(MINIMAL, "learning_rate=1")


def test_all_problems_are_reported_at_once():
    text = problems_of(MINIMAL, "model.hiden_size=256", "training.learning_rate=-1", "seed=many")
    assert "3 problems" in text
    assert "model.hiden_size" in text
    assert "training.learning_rate is -1" in text
    assert "seed is 'many'" in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.learning_rate=0", "greater than 0"),
        ("training.learning_rate=fast", "valid number"),
        ("training.learning_rate=.nan", "greater than 0"),
        ("training.learning_rate=.inf", "less than 1"),
        ("model.hidden_size=12.5", "valid integer"),
        ("model.hidden_size=true", "not true or false"),
        ("model.num_heads=7", "not a multiple of num_heads 7"),
        ("model.variant=trmm", "'trm', 'singlez' or 'transformer'"),
        ("training.effective_batch_size=-4", "greater than or equal to 1"),
        ("training.depths={5: 2}", "from step 0 on"),
        ("model.mlp_t=true", "rotary positions act inside attention"),
        ("model.neighbourhood=3", "rotary positions act inside attention"),
        ("model.neighbourhood=4", "3, 5 or 7"),
        ("model.candidates=true", "rotary positions act inside attention"),
        ("task=chess", "'sudoku'"),
        ("model=3", "valid dictionary"),
        ("data.path=", "path"),
    ],
)
def test_a_wrong_value_is_named_with_its_reason(override, message):
    assert message in problems_of(MINIMAL, override)


@pytest.mark.parametrize(
    "text", ["", "- a list", "just words", "task: [unclosed", "a: !!python/object:os.system x"]
)
def test_a_file_that_is_no_recipe_is_refused(text):
    assert "recipe.yaml" in problems_of(text)


@pytest.mark.parametrize("override", ["nonsense", "=3", "a=[1"])
def test_an_override_that_is_none_is_refused(override):
    problems_of(MINIMAL, override)


def test_overrides_read_numbers_as_people_write_them():
    config = config_from_text(MINIMAL, "r", ["training.learning_rate=1e-3", "training.depths={0: 1, 50: 4}"])
    assert config.training.learning_rate == 1e-3
    assert config.training.depths == {0: 1, 50: 4}


def test_a_missing_recipe_lists_those_there_are():
    with pytest.raises(ConfigError, match="did you mean sudoku-6x6") as caught:
        find_recipe("sudoku6x6")
    assert "sudoku-extreme" in str(caught.value.hint)


def test_a_recipe_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "recipe.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "recipe.yaml")


def test_what_is_learned_does_not_depend_on_how_it_is_carried_out():
    config = load_config("sudoku-6x6")
    changed = [
        "plan.micro_batch_size=4",
        "evaluation.every_steps=7",
        "checkpoints.keep=9",
        "data.path=elsewhere",
    ]
    assert load_config("sudoku-6x6", changed).what_is_learned() == config.what_is_learned()
    other = load_config("sudoku-6x6", ["model.hidden_size=64", "seed=5"])
    found = differences(other.what_is_learned(), config.what_is_learned())
    assert [line.split(" ")[0] for line in found] == ["model.hidden_size", "seed"]


def test_a_run_of_an_older_version_has_the_defaults_of_newer_keys():
    now = load_config("sudoku-6x6").what_is_learned()
    then = {**now, "training": {key: value for key, value in now["training"].items() if key != "noise"}}
    assert RunConfig.with_defaults(then) == now
    noisy = load_config("sudoku-6x6", ["training.noise=1"]).what_is_learned()
    assert differences(noisy, RunConfig.with_defaults(then)) == [
        "training.noise is 1.0 here and 0.0 in the run"
    ]
    unknown = {**now, "model": {**now["model"], "key_of_a_newer_version": 1}}
    assert RunConfig.with_defaults(unknown) == unknown


def test_a_run_with_a_constant_learning_rate_may_be_prolonged():
    constant = config_from_text(MINIMAL, "r", ["training.max_steps=10"])
    longer = config_from_text(MINIMAL, "r", ["training.max_steps=20"])
    assert constant.what_is_learned() == longer.what_is_learned()
    falling = [
        config_from_text(MINIMAL, "r", [f"training.max_steps={n}", "training.lr_min_ratio=0.1"])
        for n in (10, 20)
    ]
    assert falling[0].what_is_learned() != falling[1].what_is_learned()


def test_the_papers_recipe_says_what_the_paper_says():
    config = load_config("sudoku-extreme")
    model, training = config.model, config.training
    assert (model.hidden_size, model.L_layers, model.H_cycles, model.L_cycles) == (512, 2, 3, 6)
    assert model.mlp_t
    assert model.pos_encodings == "none"
    assert (model.puzzle_emb_ndim, model.puzzle_emb_len, model.halt_max_steps) == (512, 16, 16)
    assert (training.supervision, training.effective_batch_size) == ("deep", 768)
    assert (training.optimizer, training.learning_rate, training.puzzle_emb_lr) == ("adam_atan2", 1e-4, 1e-4)
    assert (training.weight_decay, training.puzzle_emb_weight_decay, training.warmup_steps) == (
        1.0,
        1.0,
        2000,
    )
    assert (training.ema, training.ema_rate, training.max_grad_norm) == (True, 0.999, None)
    assert training.max_steps == 65_104  # 50,000 epochs of 1,000 puzzles in batches of 768


def test_recipes_are_plain_yaml():
    for path in shipped_recipes().values():
        assert isinstance(yaml.safe_load(path.read_text()), dict)


NASTY = ["-1", "0", str(2**63), "1e308", ".nan", ".inf", "''", "null", "[1]"]
# Zero and null that mean something: nothing of it, or left to a measurement or a default.
MEANT = {
    "0": {
        "seed", "model.puzzle_emb_ndim", "model.puzzle_emb_len", "model.halt_exploration_prob",
        "training.lr_min_ratio", "training.warmup_steps", "training.beta1", "training.beta2",
        "training.weight_decay", "training.puzzle_emb_lr", "training.puzzle_emb_weight_decay",
        "training.halt_loss_weight", "training.ema_rate", "evaluation.target_accuracy", "data.build.seed",
        "evaluation.noise", "evaluation.guesses", "training.noise",
        "data.loading.streaming_threshold_mb", "data.loading.cache_threshold_mb",
        "training.curriculum.threshold",
        "plan.low_battery_percent", "plan.cooling_delay_seconds",
    },
    "null": {
        "training.max_grad_norm", "evaluation.settle", "evaluation.examples", "evaluation.target_accuracy",
        "checkpoints.every_steps", "checkpoints.keep_every_hours", "plan.thermal_throttle_threshold",
        "plan.micro_batch_size", "plan.threads", "plan.lanes", "plan.memory_limit_mb",
        "plan.garbage_collection_frequency", "data.build.blanks", "data.build.train",
        "data.build.train_blanks",
    },
}  # fmt: skip


def numeric_keys(section, prefix=""):
    for name, field in section.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, Section):
            yield from numeric_keys(annotation, f"{prefix}{name}.")
        elif re.search(r"\b(int|float)\b", str(annotation)) and "dict" not in str(annotation):
            yield f"{prefix}{name}"


KEYS = [
    *numeric_keys(RunConfig),
    *numeric_keys(BuildOptions, "data.build."),
    *numeric_keys(CurriculumConfig, "training.curriculum."),
    "data.build.size",
    "training.depths",
    "training.hints",
]


def test_the_numeric_keys_are_found():
    assert len(KEYS) > 40
    assert {"seed", "model.hidden_size", "plan.memory_limit_mb", "data.build.size"} <= set(KEYS)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", NASTY)
def test_a_number_that_makes_no_sense_is_refused_in_one_line_that_names_it(key, value):
    def read():
        config = load_config("sudoku-6x6", [f"{key}={value}"])
        load_task(config.task).check_options(config.data.build)

    if key in MEANT.get(value, ()):
        read()
        return
    with pytest.raises(ConfigError) as refused:
        read()
    assert key.split(".")[-1] in str(refused.value)
    assert "\n" not in str(refused.value)


def test_candidates_are_refused_for_other_tasks():
    with pytest.raises(ConfigError, match="is for Sudoku"):
        load_config("maze-10x10", ["model.neighbourhood=null", "model.candidates=true"])
