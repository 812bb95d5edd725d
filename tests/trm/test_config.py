"""Recipes: which keys and values are accepted, and how anything else is refused."""

import re
from functools import reduce

import pytest
import yaml

from macbook_optimization.errors import ConfigError
from trm.config import (
    CurriculumConfig,
    DecoderConfig,
    ModelConfig,
    PlateauConfig,
    RunConfig,
    Section,
    config_from_text,
    differences,
    find_recipe,
    load_config,
    shipped_recipes,
)
from trm.config.renamed import RENAMED
from trm.runs.directory import Run
from trm.tasks.grids.sudoku import TASK as SUDOKU
from trm.tasks.registry import load_task

MINIMAL = "task: sudoku\ndata: {path: somewhere}\n"


def problems_of(text, *overrides):
    with pytest.raises(ConfigError) as caught:
        config_from_text(text, "recipe.yaml", overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_shipped_recipe_is_valid(name):
    assert isinstance(load_config(name), RunConfig)


@pytest.mark.parametrize("name", ["sudoku-6x6", "text-1b"])
def test_a_recipe_is_unchanged_by_writing_and_reading_it(name):
    config = load_config(name)
    assert config_from_text(config.to_yaml(), "again") == config


def test_an_unknown_key_gets_a_suggestion():
    assert "did you mean hidden_size?" in problems_of(MINIMAL, "model.hiden_size=256")


def test_a_key_of_the_other_kind_of_model_is_named_as_such():
    decoder = "task: text\ndata: {path: somewhere}\nmodel: {kind: decoder}\n"
    assert "model.H_cycles is a key of model.kind=trm" in problems_of(decoder, "model.H_cycles=3")
    assert "model.num_kv_heads is a key of model.kind=decoder" in problems_of(MINIMAL, "model.num_kv_heads=2")
    assert "did you mean num_layers?" in problems_of(decoder, "model.num_layer=2")
    assert "it should be 'trm' or 'decoder'" in problems_of(MINIMAL, "model.kind=decoders")


def test_a_decoder_has_defaults_of_its_own():
    config = config_from_text("task: text\ndata: {path: somewhere}\nmodel: {kind: decoder}\n", "recipe")
    training = config.training
    assert (training.supervision, training.optimizer) == ("terminal", "adamw")
    assert training.loss == "softmax_cross_entropy"
    assert config.model.kv_heads == config.model.num_heads
    assert config.model.inner_size == 1024  # 8/3 of 384


@pytest.mark.parametrize("hidden_size", [16, 48, 96, 512])
def test_a_decoder_of_another_width_is_a_valid_one(hidden_size):
    for name in ("text-char", "text-1b"):
        model = load_config(name).model
        DecoderConfig.model_validate({**model.model_dump(), **model.resized(hidden_size)})


def test_a_key_in_the_wrong_section_gets_a_suggestion():
    assert "did you mean training.learning_rate?" in problems_of(MINIMAL, "learning_rate=1")


def test_all_problems_are_reported_together():
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
        ("training.depths={5: 2}", "depths must have a value for step 0"),
        ("training.hints={5: 0.1}", "hints must have a value for step 0"),
        ("training.phases=[{name: a}, {name: b}]", "phase a needs steps or share"),
        ("training.phases=[{name: a, steps: 5, share: 0.1}]", "phase a has both steps and share"),
        ("training.phases=[{name: a, share: 0.6}, {name: b, share: 0.5}]", "add up to 1.1"),
        ("training.phases=[{name: a, steps: 10000}, {name: b}]", "a after step 0, b after step 10000"),
        ("training.phases=[{name: a, share: 0.00001}, {name: b}]", "every phase must have a step"),
        ("training.phases=[{name: a, steps: 1}, {name: a}]", "phases must have different names"),
        ("training.phases=[{name: a, learning_rate_factor: 0}]", "phases.0.learning_rate_factor is 0"),
        ("training.phases=[{name: a, learning_rate_factor: 2}]", "less than or equal to 1"),
        ("training.phases=[{name: a, word_dropout: 1}]", "less than 1"),
        ("training.phases=[{steps: 5}]", "training.phases.0.name is missing"),
        ("training.plateau.factor=1", "less than 1"),
        ("training.plateau.min_ratio=0", "greater than 0"),
        ("model.mixer=mlp", "rotary positions act inside attention"),
        ("model.mixer=neighbourhood", "rotary positions act inside attention"),
        ("model.mixer=candidates", "rotary positions act inside attention"),
        ("model.mixer=convolution", "'attention', 'mlp', 'neighbourhood' or 'candidates'"),
        ("model.neighbourhood_size=4", "3, 5 or 7"),
        ("inference.retries=1", "retries are all the same without noise or guesses"),
        ("inference.guesses=1", "guesses are made in retries only"),
        ("model=3", "valid dictionary"),
        ("model.hidden_size=null", "model.hidden_size is null: it should be a valid integer"),
        ("training.learning_rate=false", "training.learning_rate is false: it should be a number"),
        ("data.path=", "path"),
    ],
)
def test_a_wrong_value_is_named_with_its_reason(override, message):
    assert message in problems_of(MINIMAL, override)


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (MINIMAL, ["model.hiden_size=3"], "Override model.hiden_size=3: unknown key model.hiden_size"),
        (MINIMAL, ["seed=1", "seed=many"], "Override seed=many: seed is 'many'"),
        (MINIMAL, ["model={hiden_size: 3}"], "Override model={hiden_size: 3}: unknown key model.hiden_size"),
        (MINIMAL, ["evaluation.settle=-1"], "Override evaluation.settle=-1: inference.converged_after is -1"),
        (MINIMAL, ["model.mlp_t=5"], "Override model.mlp_t=5: mlp_t is 5"),
        (MINIMAL, ["data={}"], "Override data={}: data.path is missing"),
        (MINIMAL, ["data.path=" + "x" * 99, "data.path=[" + "1, " * 99 + "1]"], "Override data.path=[1, 1"),
        (MINIMAL, ["seed=1", "model.num_heads=7"], "recipe.yaml with model.num_heads=7: model: "),
        (f"{MINIMAL}seed: many\n", ["model.num_heads=4"], "recipe.yaml: seed is 'many'"),
        (f"{MINIMAL}seed: many\n", [], "recipe.yaml: seed is 'many'"),
    ],
    ids=str,
)
def test_a_problem_names_the_override_or_the_file_that_has_it(text, overrides, message):
    assert problems_of(text, *overrides).startswith(message)


def test_problems_of_the_file_and_of_overrides_are_told_apart():
    text = problems_of(f"{MINIMAL}seed: many\n", "model.hiden_size=3", "model.expansion=-1")
    assert text.splitlines()[0] == "recipe.yaml with its overrides has 3 problems:"
    assert "  recipe.yaml: seed is 'many'" in text
    assert "  Override model.hiden_size=3: unknown key" in text
    only = problems_of(MINIMAL, "model={hiden_size: 3, expansion: -1}").splitlines()
    assert only[0] == "Override model={hiden_size: 3, expansion: -1} has 2 problems:"
    assert all("verride" not in line for line in only[1:])


def test_an_override_that_repairs_the_file_is_not_a_problem():
    assert config_from_text(f"{MINIMAL}seed: many\n", "recipe.yaml", ["seed=3"]).seed == 3


@pytest.mark.parametrize(
    "text", ["", "- a list", "just words", "task: [unclosed", "a: !!python/object:os.system x"]
)
def test_a_file_that_is_not_a_recipe_is_refused(text):
    assert "recipe.yaml" in problems_of(text)


@pytest.mark.parametrize("override", ["nonsense", "=3", "a=[1"])
def test_a_malformed_override_is_refused(override):
    problems_of(MINIMAL, override)


def test_overrides_accept_scientific_notation_and_mappings():
    config = config_from_text(MINIMAL, "r", ["training.learning_rate=1e-3", "training.depths={0: 1, 50: 4}"])
    assert config.training.learning_rate == 1e-3
    assert config.training.depths == {0: 1, 50: 4}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("task: sudoku\ndata: {path: a}\ntask: maze\n", "the key task is given twice, in lines 1 and 3"),
        (
            MINIMAL + "model:\n  num_heads: 4\n  num_heads: 8\n",
            "the key num_heads is given twice, in lines 4",
        ),
        ("task: sudoku\ndata: {path: a, path: b}\n", "the key path is given twice, in line 2"),
        (MINIMAL + "training: {depths: {0: 1, 0x0: 2}}\n", "the key 0x0 is given twice, in line 3"),
    ],
)
def test_a_key_that_is_given_twice_is_refused_with_its_lines(text, message):
    assert message in problems_of(text)


def test_a_key_that_an_override_gives_twice_is_refused():
    assert "the key 0 is given twice" in problems_of(MINIMAL, "training.depths={0: 1, 0: 2}")
    same = problems_of(MINIMAL, "training.depths={0: 1, 1000: 2, 1e3: 4}")
    assert "training.depths" in same
    assert "should not have the same step twice" in same


def test_merge_keys_may_be_overridden():
    """The merged mapping is resolved before the mapping that defines it, because it is nested deeper."""
    text = (
        "data: {path: a, build: {shared: &shared {<<: &base {train: 5}, train: 7}}}\n"
        "task: sudoku\nevaluation: {<<: {examples: 1}, examples: 2}\n"
    )
    config = config_from_text(text, "r", ["data.build.other={<<: {test: 1}, test: 2}"])
    assert config.evaluation.examples == 2
    assert config.data.build == {"shared": {"train": 7}, "other": {"test": 2}}


@pytest.mark.parametrize("value", ["!!int x", "!!bool x", "!!timestamp x", "2024-99-99"])
def test_a_value_that_does_not_fit_its_tag_is_refused(value):
    assert "recipe.yaml is not valid YAML" in problems_of(f"{MINIMAL}seed: {value}\n")


@pytest.mark.parametrize("text", ["1000", "1e3", "1.0e+3", "1_000", "1000.0", "'1000'"])
def test_an_integer_may_be_written_in_every_notation_that_is_exact(text):
    config = config_from_text(
        MINIMAL, "r", [f"training.max_steps={text}", f"training.depths={{0: 1, {text}: 2}}"]
    )
    assert config.training.max_steps == 1000
    assert config.training.depths == {0: 1, 1000: 2}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("1e9", "model.hidden_size is '1e9': it should be less than or equal to 65536"),
        ("1.5e0", "model.hidden_size is '1.5e0': it should be a valid integer"),
        ("1e999999999", "model.hidden_size is '1e999999999': it should be an integer of at most 19 digits"),
        ("nan", "model.hidden_size is 'nan': it should be a valid integer"),
    ],
)
def test_a_number_with_an_exponent_is_refused_for_what_it_is(value, message):
    assert message in problems_of(MINIMAL, f"model.hidden_size={value}")


def test_a_target_needs_evaluations():
    never = config_from_text(MINIMAL, "r", ["evaluation.every_steps=null"])
    assert never.evaluation.every_steps is None
    text = problems_of(MINIMAL, "evaluation.every_steps=null", "evaluation.target_accuracy=0.9")
    assert "target_accuracy 0.9 is never reached without evaluations" in text
    assert "evaluation.target_accuracy=null" in text


def test_a_missing_recipe_is_refused_with_the_names_of_the_shipped_ones():
    with pytest.raises(ConfigError, match="did you mean sudoku-6x6") as caught:
        find_recipe("sudoku6x6")
    assert "sudoku-extreme" in str(caught.value.hint)


def test_a_recipe_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "recipe.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="Cannot read"):
        load_config(tmp_path / "recipe.yaml")


def test_what_is_learned_does_not_depend_on_how_the_recipe_is_run():
    config = load_config("sudoku-6x6")
    changed = [
        "plan.micro_batch_size=4",
        "limits.memory_limit_mb=2000",
        "inference.depth=5",
        "evaluation.every_steps=7",
        "checkpoints.keep=9",
        "data.path=elsewhere",
    ]
    assert load_config("sudoku-6x6", changed).what_is_learned() == config.what_is_learned()
    other = load_config("sudoku-6x6", ["model.hidden_size=64", "seed=5"])
    found = differences(other.what_is_learned(), config.what_is_learned())
    assert [line.split(" ")[0] for line in found] == ["model.hidden_size", "seed"]


def test_a_run_of_an_earlier_version_has_the_defaults_of_newer_keys():
    now = load_config("sudoku-6x6").what_is_learned()
    then = {**now, "training": {key: value for key, value in now["training"].items() if key != "noise"}}
    assert RunConfig.learned_with_defaults(then) == now
    noisy = load_config("sudoku-6x6", ["training.noise=1"]).what_is_learned()
    assert differences(noisy, RunConfig.learned_with_defaults(then)) == [
        "training.noise is 1.0 here and 0.0 in the run"
    ]
    unknown = {**now, "model": {**now["model"], "key_of_a_newer_version": 1}}
    assert RunConfig.learned_with_defaults(unknown) == unknown


def test_a_run_with_a_constant_learning_rate_may_be_extended():
    constant = config_from_text(MINIMAL, "r", ["training.max_steps=10"])
    longer = config_from_text(MINIMAL, "r", ["training.max_steps=20"])
    assert constant.what_is_learned() == longer.what_is_learned()
    falling = [
        config_from_text(MINIMAL, "r", [f"training.max_steps={n}", "training.lr_min_ratio=0.1"])
        for n in (10, 20)
    ]
    assert falling[0].what_is_learned() != falling[1].what_is_learned()


def test_the_length_of_a_run_matters_where_phases_are_shares_of_it():
    def learned(max_steps, duration):
        phases = f"training.phases=[{{name: a, {duration}}}, {{name: b, learning_rate_factor: 0.1}}]"
        return config_from_text(MINIMAL, "r", [f"training.max_steps={max_steps}", phases]).what_is_learned()

    assert learned(100, "steps: 10") == learned(200, "steps: 10")
    assert differences(learned(100, "share: 0.1"), learned(200, "share: 0.1")) == [
        "training.max_steps is 100 here and 200 in the run"
    ]


def test_evaluations_decide_what_is_learned_where_they_decide_the_learning_rate():
    def learned(*overrides):
        return load_config("sudoku-6x6", ["training.plateau={}", *overrides]).what_is_learned()

    for override in ("evaluation.every_steps=7", "evaluation.examples=9", "inference.depth=5"):
        (found,) = differences(learned(override), learned())
        assert found.startswith(override.partition("=")[0])
        assert RunConfig.learned_with_defaults(learned(override)) == learned(override)
    assert learned("evaluation.target_accuracy=0.1", "checkpoints.keep=9") == learned()


def test_keys_that_exclude_each_other_are_refused_together():
    assert "evaluation.every_steps is null" in problems_of(
        MINIMAL, "training.plateau={}", "evaluation.every_steps=null"
    )
    adaptive = "training.adaptive_min_length=8"
    assert "excludes training.deterministic" in problems_of(MINIMAL, adaptive, "training.deterministic=true")
    assert "needs limits.dynamic_batch_sizing" in problems_of(
        MINIMAL, adaptive, "limits.dynamic_batch_sizing=false"
    )


def test_the_recipe_of_the_paper_has_the_settings_of_the_paper():
    config = load_config("sudoku-extreme")
    model, training = config.model, config.training
    assert (model.hidden_size, model.L_layers, model.H_cycles, model.L_cycles) == (512, 2, 3, 6)
    assert model.mixer == "mlp"
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
# Zero that means none, and null that means a measured value or a default.
ACCEPTED = {
    "0": {
        "seed", "model.puzzle_emb_ndim", "model.puzzle_emb_len", "model.halt_exploration_prob",
        "training.lr_min_ratio", "training.warmup_steps", "training.beta1", "training.beta2",
        "training.weight_decay", "training.puzzle_emb_lr", "training.puzzle_emb_weight_decay",
        "training.halt_loss_weight", "training.ema_rate", "evaluation.target_accuracy", "data.build.seed",
        "inference.noise", "inference.guesses", "inference.retries", "training.noise",
        "data.loading.streaming_threshold_mb", "data.loading.cache_threshold_mb",
        "training.curriculum.threshold", "training.label_smoothing", "training.word_dropout",
        "training.class_weights",
        "limits.low_battery_percent", "limits.cooling_delay_seconds",
    },
    "null": {
        "model.attention_window", "training.max_grad_norm", "training.adaptive_min_length",
        "inference.converged_after", "evaluation.examples",
        "evaluation.target_accuracy", "evaluation.target_loss",
        "checkpoints.every_steps", "checkpoints.keep_every_hours",
        "limits.thermal_throttle_threshold",
        "plan.micro_batch_size", "plan.threads", "plan.workers", "limits.memory_limit_mb",
        "limits.garbage_collection_frequency", "data.build.blanks", "data.build.train",
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
    *numeric_keys(ModelConfig, "model."),
    *numeric_keys(SUDOKU.Options, "data.build."),
    *numeric_keys(CurriculumConfig, "training.curriculum."),
    *numeric_keys(PlateauConfig, "training.plateau."),
    "data.build.size",
    "training.depths",
    "training.hints",
    "training.class_weights",
]


def test_every_numeric_key_is_tested():
    assert len(KEYS) > 40
    assert {"seed", "model.hidden_size", "limits.memory_limit_mb", "data.build.size"} <= set(KEYS)


@pytest.mark.parametrize("key", numeric_keys(DecoderConfig, "model."))
@pytest.mark.parametrize("value", NASTY)
def test_a_number_of_a_decoder_out_of_range_is_refused_too(key, value):
    accepted = {"null": ("model.num_kv_heads", "model.intermediate_size"), "0": ("model.dropout",)}
    if key in accepted.get(value, ()):
        assert load_config("text-char", [f"{key}={value}"]).model.kind == "decoder"
        return
    with pytest.raises(ConfigError, match=key.split(".")[-1]):
        load_config("text-char", [f"{key}={value}"])


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", NASTY)
def test_a_number_out_of_range_is_refused_in_one_line_that_names_its_key(key, value):
    def read():
        config = load_config("sudoku-6x6", [f"{key}={value}"])
        load_task(config.task).check_options(config.data.build)

    if key in ACCEPTED.get(value, ()):
        read()
        return
    with pytest.raises(ConfigError) as refused:
        read()
    assert key.split(".")[-1] in str(refused.value)
    assert "\n" not in str(refused.value)


# Renamed keys: sections with the earlier key and what it needs, the present key, and its value.
EARLIER_KEYS = {
    "evaluation.depth": ({"evaluation": {"depth": 7}}, "inference.depth", 7),
    "evaluation.settle": ({"evaluation": {"settle": 3}}, "inference.converged_after", 3),
    "evaluation.halt": ({"evaluation": {"halt": True}}, "inference.halt", True),
    "evaluation.tries": ({"evaluation": {"noise": 1, "tries": 4}}, "inference.retries", 3),
    "evaluation.noise": ({"evaluation": {"noise": 0.5}}, "inference.noise", 0.5),
    "evaluation.guesses": ({"evaluation": {"tries": 2, "noise": 1, "guesses": 2}}, "inference.guesses", 2),
    "plan.lanes": ({"plan": {"lanes": 2}}, "plan.workers", 2),
    "plan.memory_limit_mb": ({"plan": {"memory_limit_mb": 900}}, "limits.memory_limit_mb", 900),
    "plan.memory_fraction": ({"plan": {"memory_fraction": 0.3}}, "limits.memory_fraction", 0.3),
    "plan.dynamic_batch_sizing": (
        {"plan": {"dynamic_batch_sizing": False}}, "limits.dynamic_batch_sizing", False,
    ),
    "plan.memory_pressure_threshold": (
        {"plan": {"memory_pressure_threshold": 70}}, "limits.memory_pressure_threshold", 70,
    ),
    "plan.garbage_collection_frequency": (
        {"plan": {"garbage_collection_frequency": 5}}, "limits.garbage_collection_frequency", 5,
    ),
    "plan.low_battery_percent": ({"plan": {"low_battery_percent": 30}}, "limits.low_battery_percent", 30),
    "plan.enable_thermal_monitoring": (
        {"plan": {"enable_thermal_monitoring": False}}, "limits.enable_thermal_monitoring", False,
    ),
    "plan.thermal_throttle_threshold": (
        {"plan": {"thermal_throttle_threshold": 85}}, "limits.thermal_throttle_threshold", 85,
    ),
    "plan.cooling_delay_seconds": ({"plan": {"cooling_delay_seconds": 9}}, "limits.cooling_delay_seconds", 9),
    "model.mlp_t": ({"model": {"pos_encodings": "none", "mlp_t": True}}, "model.mixer", "mlp"),
    "model.neighbourhood": (
        {"model": {"pos_encodings": "none", "neighbourhood": 5}}, "model.neighbourhood_size", 5,
    ),
    "model.candidates": (
        {"model": {"pos_encodings": "none", "candidates": True}}, "model.mixer", "candidates",
    ),
}  # fmt: skip


def value_of(config, key):
    return reduce(getattr, key.split("."), config)


def tree_of(sections):
    return {**yaml.safe_load(MINIMAL), **sections}


def overrides_of(sections):
    return [
        f"{section}.{key}={yaml.safe_dump(value).partition(chr(10))[0]}"
        for section, values in sections.items()
        for key, value in values.items()
    ]


def test_every_renamed_key_is_tested():
    mixers = {"model.mlp_t", "model.neighbourhood", "model.candidates"}
    assert set(EARLIER_KEYS) == {".".join(earlier) for earlier in RENAMED} | mixers
    for (section, key), (new_section, new_key, _) in RENAMED.items():
        assert EARLIER_KEYS[f"{section}.{key}"][1] == f"{new_section}.{new_key}"


@pytest.mark.parametrize("key", EARLIER_KEYS)
def test_an_earlier_key_is_accepted_in_a_recipe(key):
    sections, present, value = EARLIER_KEYS[key]
    config = config_from_text(yaml.safe_dump(tree_of(sections)), "recipe.yaml")
    assert value_of(config, present) == value != value_of(config_from_text(MINIMAL, "default"), present)
    assert RunConfig.model_validate(tree_of(sections)) == config
    assert config_from_text(config.to_yaml(), "again") == config


@pytest.mark.parametrize("key", EARLIER_KEYS)
def test_an_earlier_key_is_accepted_in_an_override(key):
    sections, present, value = EARLIER_KEYS[key]
    assert value_of(config_from_text(MINIMAL, "recipe.yaml", overrides_of(sections)), present) == value


@pytest.mark.parametrize("key", EARLIER_KEYS)
def test_an_earlier_key_is_accepted_in_a_saved_run(key, tmp_path):
    sections, present, value = EARLIER_KEYS[key]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(tree_of(sections)))
    assert value_of(Run(tmp_path).config, present) == value


@pytest.mark.parametrize("key", [key for key in EARLIER_KEYS if key.startswith("model.")])
def test_an_earlier_key_in_a_checkpoint_is_compared_under_its_present_name(key):
    sections, _, _ = EARLIER_KEYS[key]
    config = config_from_text(yaml.safe_dump(tree_of(sections)), "recipe.yaml")
    saved = config.what_is_learned()
    for present in ("kind", "mixer", "neighbourhood_size"):
        del saved["model"][present]
    saved["model"].update(sections["model"])
    assert RunConfig.learned_with_defaults(saved) == config.what_is_learned()


@pytest.mark.parametrize("key", EARLIER_KEYS)
def test_a_file_whose_earlier_and_present_keys_contradict_each_other_is_refused(key):
    sections, present, _ = EARLIER_KEYS[key]
    other = value_of(config_from_text(MINIMAL, "default"), present)
    tree = tree_of(sections)
    section, leaf = present.split(".")
    tree[section] = {**tree.get(section, {}), leaf: other}
    text = problems_of(yaml.safe_dump(tree))
    assert f"{key} is now {present}; both are given, with different values" in text


@pytest.mark.parametrize("key", EARLIER_KEYS)
def test_a_file_may_give_earlier_and_present_keys_with_the_same_value(key):
    sections, present, value = EARLIER_KEYS[key]
    section, leaf = present.split(".")
    tree = tree_of(sections)
    tree[section] = {**tree.get(section, {}), leaf: value}
    assert value_of(config_from_text(yaml.safe_dump(tree), "recipe.yaml"), present) == value


@pytest.mark.parametrize("key", EARLIER_KEYS)
def test_an_override_with_an_earlier_key_wins_over_the_file(key):
    sections, present, value = EARLIER_KEYS[key]
    section, leaf = present.split(".")
    in_file = value_of(config_from_text(MINIMAL, "default"), present)
    tree = tree_of({section: {leaf: in_file}})
    config = config_from_text(yaml.safe_dump(tree), "recipe.yaml", overrides_of(sections))
    assert value_of(config, present) == value


@pytest.mark.parametrize("key", EARLIER_KEYS)
def test_an_override_with_the_present_key_wins_over_an_earlier_key_in_the_file(key):
    sections, present, _ = EARLIER_KEYS[key]
    default = value_of(config_from_text(MINIMAL, "default"), present)
    guesses = ["inference.guesses=0"] if key == "evaluation.tries" else []
    override = overrides_of({present.split(".")[0]: {present.split(".")[1]: default}})
    config = config_from_text(yaml.safe_dump(tree_of(sections)), "recipe.yaml", [*override, *guesses])
    assert value_of(config, present) == default


def test_the_last_of_several_overrides_wins_whichever_name_it_uses():
    both = ("evaluation.depth=3", "inference.depth=5")
    assert config_from_text(MINIMAL, "r", both).inference.depth == 5
    assert config_from_text(MINIMAL, "r", both[::-1]).inference.depth == 3


@pytest.mark.parametrize(
    ("overrides", "mixer"),
    [
        (["model.candidates=false", "model.mlp_t=true"], "mlp"),
        (["model.mlp_t=true", "model.candidates=false"], "mlp"),
        (["model.candidates=false"], "attention"),
        (["model.neighbourhood=null"], "candidates"),
        (["model.neighbourhood=7"], "neighbourhood"),
    ],
)
def test_a_mixer_is_replaced_by_overrides_with_earlier_keys(overrides, mixer):
    assert load_config("sudoku-6x6").model.mixer == "candidates"
    assert load_config("sudoku-6x6", overrides).model.mixer == mixer


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{mlp_t: true, candidates: true}", "one of mlp_t, neighbourhood and candidates"),
        ("{mlp_t: 1}", "mlp_t is 1: it should be true or false"),
        ("{candidates: yes please}", "candidates is 'yes please': it should be true or false"),
        ("{neighbourhood: 4, pos_encodings: none}", "3, 5 or 7"),
        ("{neighbourhood: 0}", "neighbourhood is 0: it should be 3, 5, 7 or null"),
        ("{neighbourhood: true, pos_encodings: none}", "3, 5 or 7"),
        ("{neighbourhood: 3, neighbourhood_size: 5, pos_encodings: none}", "with different values"),
        ("{mlp_t: false, mixer: mlp, pos_encodings: none}", "with different values"),
    ],
)
def test_earlier_mixer_keys_with_impossible_values_are_refused(model, message):
    assert message in problems_of(f"{MINIMAL}model: {model}\n")


@pytest.mark.parametrize("key", [key for key in EARLIER_KEYS if not key.startswith("model.")])
@pytest.mark.parametrize("value", ["-1", "[1]", ".nan", "''"])
def test_an_earlier_key_with_a_value_out_of_range_is_refused_under_its_present_name(key, value):
    text = problems_of(MINIMAL, f"{key}={value}")
    assert EARLIER_KEYS[key][1] in text
    assert "\n" not in text
