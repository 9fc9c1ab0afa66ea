"""O1 and O2: what is wrong with a configuration is one sentence that names the key, the nearest right one, and the remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import yaml
from pydantic import BaseModel

from driver.advantage import ADVANTAGES
from driver.config import ConfigError, load_config, parse_config, weights_bytes
from driver.mix import Change
from driver.settings import LossConfig, RunConfig, ServiceConfig
from trainer.loss_spec import CriticSpec, LossSpec

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "examples/sort_digits/base")


def write(tmp_path: Path, **sections: object) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"run_id": "r", "model": {"path": MODEL}, **sections}))
    return path


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"stalenes": {"bound": 1}}, ["'stalenes'", "'staleness'"]),
        ({"rollout": {"enginez": 2}}, ["'rollout.enginez'", "'engine'"]),
        ({"rollout": {"sampling": {"temprature": 1.0}}}, ["'rollout.sampling.temprature'", "'temperature'"]),
        ({"trainer": {"loss": {"clip_hi": 0.3}}}, ["'trainer.loss.clip_hi'", "'clip_high'"]),
        ({"trainer": {"loss": {"policy": "grpo"}}}, ["trainer.loss.policy", "'grpo' is not known: did you mean 'gspo'?"]),
        ({"trainer": {"loss": {"policy": "gspo"}}}, ["trainer.loss", "set clip_low and clip_high"]),
        ({"trainer": {"loss": {"aggregation": "constant"}}}, ["trainer.loss", "needs a divisor"]),
        ({"trainer": {"loss": {"advantage": "gae"}}}, ["trainer.loss.advantage", "rloo"]),
        ({"trainer": {"loss": {"policy": "nowhere.py:mine"}}}, ["trainer.loss.policy", "there is no file", "nowhere.py"]),
        (
            {"trainer": {"loss": {"policy": f"{ROOT}/examples/sort_digits/reward.py:scor"}}},
            ["trainer.loss.policy", "has no 'scor'", "'score'"],
        ),
        ({"trainer": {"loss": {"correction": {"wait": "token"}}}}, ["'trainer.loss.correction.wait'", "'weight'"]),
        ({"trainer": {"loss": {"correction": {"weight": "token"}}}}, ["trainer.loss", "old_log_probs: recomputed"]),
        ({"trainer": {"loss": {"kl": {"reference": "nowhere"}}}}, ["trainer.loss.kl.reference", "no config.json"]),
        ({"trainer": {"loss": {"kl": {"coefficient": 0.1, "where": "reward"}}}}, ["trainer", "needs a critic", "kl.where: loss"]),
        ({"trainer": {"critic": {"targets": "vtrace"}}}, ["trainer", "loss.old_log_probs: recomputed"]),
        ({"trainer": {"device": "cuda"}}, ["trainer.device is cuda", "no NVIDIA device", "cpu"]),
        ({"trainer": {"critic": {"gama": 1.0}}}, ["'trainer.critic.gama'", "'gamma'"]),
        ({"trainer": {"critic": {"model_path": "nowhere"}}}, ["trainer.critic.model_path", "no config.json"]),
        ({"rollout": {"sampling": {"top_p": 0.9}}}, ["unknown key 'rollout.sampling.top_p'"]),
        ({"rollout": {"sampling": {"temperature": 0.0}}}, ["rollout.sampling.temperature", "above 0"]),
        ({"rollout": {"engine": "sglang", "deterministic": True}}, ["rollout", "deterministic needs engine: embedded"]),
        ({"rollout": {"engine": "sglang", "engine_args": ["--x"]}}, ["rollout", "rollout.sglang.args"]),
        ({"rollout": {"engine": "sglang", "sglang": {"python": "nowhere"}}}, ["rollout.sglang", "no Python", "make sglang"]),
        ({"rollout": {"sglang": {"pyton": "x"}}}, ["'rollout.sglang.pyton'", "'python'"]),
        ({"push": {"transport": "tensor"}}, ["push.transport tensor is not for engine embedded", "auto"]),
        ({"push": {"backend": "nccl"}, "trainer": {"device": "cpu"}}, ["push.backend nccl", "trainer.device is cpu"]),
        ({"rollout": {"n": 1}}, ["min_group", "exceeds rollout.n", "lower it"]),
        ({"rollout": {"n": 1, "min_group": 1}}, ["rollout.n is 1", "set trainer.critic"]),
        ({"batch": {"samples": 2, "mini_batches": 3}}, ["mini_batches (3) exceeds samples (2)"]),
        ({"batch": {"micro_batch_tokens": 100}}, ["micro_batch_tokens (100)", "context_length", "batch.long_rows: alone"]),
        ({"rollout": {"context_length": 4096}, "batch": {"micro_batch_tokens": 8192}}, ["max_position_embeddings (256)"]),
        ({"reward": {"scorers": {"*": {"rule": "exact", "function": "a:b"}}}}, ["either `rule`"]),
        ({"reward": {"scorers": {"*": {"function": "nowhere.py:f"}}}}, ["there is no file", "nowhere.py"]),
        ({"trainer": {"schedule": "linear"}}, ["stop.batches"]),
        ({"trainer": {"tp": 4}}, ["trainer: ", "num_attention_heads (2)", "tp (4)", "choose a tp"]),
        ({"trainer": {"pp": 3}}, ["trainer: ", "num_hidden_layers (2)", "pp (3)", "choose a pp"]),
        ({"trainer": {"dp": 2, "ep": 2}}, ["trainer: ", "ep (2) splits experts", "has none", "leave ep at 1"]),
        ({"trainer": {"routing_replay": True}}, ["trainer: ", "routing_replay", "leave it off"]),
        ({"trainer": {"sequence_parallel": True}}, ["trainer: ", "tp is 1", "leave sequence_parallel out"]),
        ({"trainer": {"distributed_optimizer": True, "optimizer": "sgd"}}, ["trainer: ", "adam only", "change one"]),
        ({"trainer": {"device": "cpu", "optimizer_offload": 0.5}}, ["trainer: ", "nothing to offload to", "device to cuda"]),
        ({"model": {"path": "nowhere"}}, ["nowhere does not exist", "nothing is downloaded"]),
        ({"data": "nothing.jsonl"}, ["there is no file", "nothing.jsonl"]),
        ({"data": [{"path": "a", "weigth": 1}]}, ["'data.0.weigth'", "did you mean 'weight'"]),
        ({"data": [{"path": "a"}, {"path": "b", "prority": 1}]}, ["'data.1.prority'", "did you mean 'priority'"]),
        ({"data": [{"path": "x/a"}, {"path": "y/a"}]}, ["two datasets are called 'a'", "`name`"]),
        ({"data": [{"path": "a", "weight": 0}, {"path": "b", "weight": 0}]}, ["all weights would be 0"]),
        ({"data": [{"path": "a", "weight": -2}]}, ["data.0", "weight -2.0 is no share"]),
        ({"data": [{"path": "a", "weight": float("nan")}]}, ["data.0.weight", "finite"]),
        ({"data": [{"path": "a", "priority": 1.5}]}, ["data.0.priority is 1.5", "whole number"]),
        ({"data": [{"path": "a", "epochs": 0}]}, ["data.0.epochs is 0", "at least 1"]),
        ({"data": [{"weight": 1}]}, ["data.0.path is required"]),
        ({"data": 5}, ["data", "list"]),
        ({"filter": {"min_pass_rate": 0.5, "max_pass_rate": 0.5}}, ["filter", "is not below max_pass_rate"]),
        ({"filter": {"max_passrate": 1}}, ["'filter.max_passrate'", "'max_pass_rate'"]),
        ({"curriculum": {"function": "nowhere.py:f"}}, ["curriculum.function", "there is no file", "nowhere.py"]),
        ({"curriculum": {"function": f"{ROOT}/examples/sort_digits/reward.py:scor"}}, ["curriculum.function", "has no 'scor'", "'score'"]),
        ({"service": {"host": "0.0.0.0"}}, ["service.token", "HEADRACE_TOKEN"]),
        ({"service": {"engine_hosts": ["http://10.0.0.7:30000"]}}, ["not a host", "like 10.0.0.7:30000"]),
        ({"run_id": "a/b"}, ["run_id"]),
        ({"reward": {"scorers": {"*": {"function": f"{ROOT}/examples/sort_digits/reward.py:scor"}}}}, ["has no 'scor'", "'score'"]),
        ({"reward": {"scorers": {"*": {"function": "reward.py"}}}}, ["path/file.py:name"]),
        ({"store": {"capacity_bytes": 8 << 20}}, ["store.capacity_bytes", "too small", "checkpoint.every"]),
        ({"store": "mooncak"}, ["store.kind", "'mooncake'"]),
        ({"store": {"kind": "mooncake", "mooncake": {"mastr": "h:1"}}}, ["'store.mooncake.mastr'", "'master'"]),
        ({"store": {"kind": "mooncake", "mooncake": {"master": "h"}}}, ["store.mooncake.master", "HOST:PORT", "null starts one"]),
        (
            {"store": {"kind": "mooncake", "mooncake": {"segment_bytes": 0}}},
            ["store.mooncake.segment_bytes is 0", "there is no memory", "store.mooncake.master"],
        ),
        ({"store": {"kind": "mooncake", "mooncake": {"segment_bytes": 5}}}, ["store.mooncake.segment_bytes", " 5 ", "at least 16,777,216"]),
        (
            {"store": {"kind": "mooncake", "capacity_bytes": 1 << 30, "mooncake": {"segment_bytes": 1 << 29}}},
            ["store.mooncake.segment_bytes (536,870,912)", "at least store.capacity_bytes (1,073,741,824)", "leave it out"],
        ),
        ({"store": {"kind": "mooncake", "mooncake": {"master": "h:1", "port": 2}}}, ["store.mooncake", "somebody else's", "remove one"]),
        ({"store": {"mooncake": {"master": "h:1"}}}, ["store.mooncake.master has no effect on the embedded store", "store.kind: mooncake"]),
    ],
)
def test_O1_O2_a_mistake_is_named_with_its_remedy(tmp_path, sections, words):
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, **sections))
    for word in words:
        assert word in str(error.value)


def test_N5_a_row_that_the_layout_would_pad_above_the_budget_is_refused_unless_it_may_be_alone(tmp_path: Path) -> None:
    sections = {"rollout": {"context_length": 253}, "trainer": {"cp": 2}}
    with pytest.raises(
        ConfigError, match=r"micro_batch_tokens \(254\) is below rollout.context_length \(253, which the layout pads to 256\)"
    ):
        load_config(write(tmp_path, **sections, batch={"micro_batch_tokens": 254}))
    load_config(write(tmp_path, **sections, batch={"micro_batch_tokens": 256}))
    assert load_config(write(tmp_path, **sections, batch={"micro_batch_tokens": 64, "long_rows": "alone"})).batch.long_rows == "alone"


def test_data_is_a_file_or_a_list_of_datasets_with_their_shares_beside_the_configuration(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).touch()
    (one,) = load_config(write(tmp_path, data="a.jsonl")).data
    assert (one.path, one.called, one.share) == (tmp_path / "a.jsonl", "a.jsonl", Change(1.0, 0))
    first, second = load_config(
        write(tmp_path, data=[{"path": "a.jsonl", "epochs": None, "weight": 3}, {"path": "b.jsonl", "name": "b"}])
    ).data
    assert first.share == Change(3.0, 0, None, True) and (second.called, second.share.own_passes) == ("b", False)
    assert load_config(write(tmp_path, data=None)).data == [] == load_config(write(tmp_path)).data


def test_a_run_chooses_its_store_and_on_several_hosts_it_is_mooncake_unless_it_says_otherwise(tmp_path: Path) -> None:
    def kind(**sections: object) -> str:
        return load_config(write(tmp_path, **sections)).store_kind

    assert kind() == "embedded" and kind(store="mooncake") == kind(store={"kind": "mooncake"}) == "mooncake"
    assert kind(hosts=["10.0.0.2"]) == "mooncake" and kind(hosts=["10.0.0.2"], store="embedded") == "embedded"


def test_with_a_critic_a_prompt_needs_no_group(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, rollout={"n": 1, "min_group": 1}, trainer={"critic": {}}))
    assert config.rollout.n == 1 and config.trainer.critic is not None


def test_every_choice_of_the_loss_reaches_the_trainer_and_every_advantage_can_be_chosen(tmp_path):
    loss = {"policy": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": 2.0, "aggregation": "constant", "divisor": 9.0}
    loss |= {"entropy_bonus": 0.01}
    for kind in ADVANTAGES:
        config = load_config(write(tmp_path, trainer={"loss": {**loss, "advantage": kind}})).trainer.loss
        assert config.advantage == kind
        assert type(config.spec) is LossSpec and config.spec == LossSpec.model_validate(loss)
    assert get_args(LossConfig.model_fields["advantage"].annotation) == tuple(ADVANTAGES)


def test_a_function_of_the_user_s_and_other_models_are_found_beside_the_configuration(tmp_path):
    (tmp_path / "mine.py").write_text("def loss(tokens, spec): ...")
    (tmp_path / "older").symlink_to(MODEL)
    trainer = {"loss": {"policy": "mine.py:loss", "params": {"x": 0.5}, "kl": {"coefficient": 0.1, "reference": "older"}}}
    config = load_config(write(tmp_path, trainer={**trainer, "critic": {"model_path": "older", "learning_rate": 0.1}})).trainer
    assert config.loss.policy == f"{tmp_path}/mine.py:loss" and config.loss.params == {"x": 0.5}
    assert config.loss.kl.reference == config.critic.model_path == Path(MODEL).resolve()
    assert config.critic.spec == CriticSpec(model_path=Path(MODEL).resolve())


def test_bf16_widens_what_a_push_may_differ_by_unless_it_is_set_and_halves_what_a_snapshot_takes(tmp_path):
    model = ROOT / "examples/sort_digits/base"
    found = {dtype: load_config(write(tmp_path, trainer={"dtype": dtype})) for dtype in ("float32", "bfloat16")}
    assert {dtype: config.logprob_tolerance for dtype, config in found.items()} == {"float32": 1e-3, "bfloat16": 0.1}
    tight = load_config(write(tmp_path, trainer={"dtype": "bfloat16"}, push={"logprob_tolerance": 0.02}))
    assert tight.logprob_tolerance == 0.02
    assert weights_bytes(model, "float32") == 2 * weights_bytes(model, "bfloat16") == (model / "model.safetensors").stat().st_size


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan"])
@pytest.mark.parametrize("key", ["trainer.learning_rate", "trainer.loss.dual_clip", "stop.reward", "rollout.sampling.temperature"])
def test_O1_a_number_that_is_not_finite_is_refused(tmp_path: Path, key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is -?(inf|nan)"):
        load_config(write(tmp_path), [f"{key}={value}"])


def test_O1_no_part_of_the_configuration_takes_keys_it_does_not_know_or_numbers_that_are_not_finite():
    parts: list[type[BaseModel]] = [RunConfig]
    for part in parts:
        inner = [field.annotation for field in part.model_fields.values()]
        for kind in inner:  # grows by what a union, a list or a mapping is of
            inner += get_args(kind)
            if isinstance(kind, type) and issubclass(kind, BaseModel) and kind not in parts:
                parts.append(kind)
    assert len(parts) > 20
    loose = [
        part.__name__ for part in parts if part.model_config.get("allow_inf_nan") is not False or part.model_config["extra"] != "forbid"
    ]
    assert not loose


def test_files_that_are_no_configuration_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no configuration file"):
        load_config(tmp_path / "absent.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="mapping"):
        load_config(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    with pytest.raises(ConfigError, match="not YAML"):
        load_config(tmp_path / "broken.yaml")


def test_overrides_change_one_key_and_are_checked_like_the_rest(tmp_path):
    path = write(tmp_path)
    config = load_config(path, ["batch.samples=4", "service.port=0", "stop.epochs=null"])
    assert (config.batch.samples, config.service.port, config.stop.epochs) == (4, 0, None)
    with pytest.raises(ConfigError, match="did you mean 'samples'"):
        load_config(path, ["batch.sample=4"])
    with pytest.raises(ConfigError, match="key=value"):
        load_config(path, ["batch.samples"])


def test_paths_are_relative_to_the_file_that_names_them():
    config = load_config(ROOT / "examples/sort_digits/config.yaml")
    assert config.model.path == Path(MODEL)
    assert config.reward.scorers["sort"].function == f"{ROOT}/examples/sort_digits/reward.py:score"


def test_a_token_may_come_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_TEST_TOKEN", "secret")
    config = load_config(write(tmp_path, service={"host": "0.0.0.0", "token": "${HEADRACE_TEST_TOKEN}"}))
    assert config.service.token == "secret"
    monkeypatch.delenv("HEADRACE_TEST_TOKEN")
    with pytest.raises(ConfigError, match="HEADRACE_TEST_TOKEN is not set"):
        load_config(write(tmp_path, service={"token": "${HEADRACE_TEST_TOKEN}"}))


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("localhost", True), ("::1", True), ("10.0.0.1", False)])
def test_loopback_is_known(host, loopback):
    assert ServiceConfig(host=host, token="t").loopback is loopback


def test_the_learning_rate_depends_on_the_batch_alone(tmp_path):
    config = load_config(write(tmp_path, trainer={"learning_rate": 1.0, "warmup_batches": 4, "schedule": "linear"}, stop={"batches": 14}))
    rates = [config.trainer.learning_rate_at(batch, 14) for batch in range(15)]
    assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert rates[4] == 1.0 and rates[9] == pytest.approx(0.5) and rates[14] == 0.0
    cosine = load_config(write(tmp_path, trainer={"learning_rate": 1.0, "schedule": "cosine"}, stop={"batches": 10})).trainer
    assert cosine.learning_rate_at(5, 10) == pytest.approx(0.5)
    constant = load_config(write(tmp_path, trainer={"learning_rate": 1.0})).trainer
    assert constant.learning_rate_at(10**6, None) == 1.0


@pytest.mark.parametrize(
    ("sections", "needed"),
    [
        ({}, False),
        ({"push": {"transport": "distributed"}}, True),
        ({"rollout": {"engine_urls": ["http://127.0.0.1:30000"]}}, False),
        ({"rollout": {"engine_urls": ["http://127.0.0.1:30000", "http://10.0.0.7:30000"]}}, True),
        ({"service": {"engine_hosts": ["*.gpus.example"]}}, True),
        ({"rollout": {"engine_urls": ["http://10.0.0.7:30000"]}, "push": {"transport": "disk"}}, False),
    ],
)
def test_a_courier_is_started_where_some_engine_may_need_it(tmp_path, sections, needed):
    assert load_config(write(tmp_path, **sections)).needs_courier is needed


def test_a_key_is_one_that_a_header_takes_and_is_not_shown_where_it_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_TEST_KEY", "abc\n")
    config = load_config(write(tmp_path, rollout={"engine_api_key": "${HEADRACE_TEST_KEY}"}))
    assert config.rollout.engine_api_key == "abc"
    for key in ("ключ", "a\nb"):
        with pytest.raises(ConfigError, match=r"rollout\.engine_api_key.*printable ASCII") as refused:
            load_config(write(tmp_path, rollout={"engine_api_key": key}))
        assert key not in str(refused.value)


def test_a_role_of_the_users_is_printed_as_it_was_written_and_a_misspelled_key_of_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class A: ...\n")
    role = f"{{mine: {{logic: '{tmp_path}/a.py:A', subscribes: {{metrics: {{kind: queue, schema: {{batch_id: int}}}}}}}}}}"
    config = load_config(ROOT / "examples/sort_digits/config.yaml", [f"roles={role}"])
    dumped = config.model_dump(mode="json")["roles"]["mine"]
    assert dumped["subscribes"] == {"metrics": {"kind": "queue", "schema": {"batch_id": "int"}}}
    again = parse_config(config.model_dump(mode="json"), Path("/"))
    assert again.roles == config.roles, "what is printed can be read"
    for broken, words in (
        ("{mine: {logic: 'a.py:A', subscribs: {}}}", "did you mean 'subscribes'"),
        ("{trainer: {logic: 'a.py:A', subscribes: {metrics: queue}}}", "that name is one of the run's own"),
        ("{mine: {logic: 'a.py:A'}}", "a role with nothing to read never runs"),
        ("{mine: {logic: 'a.py:A', subscribes: {metrics: {kind: queue, schema: {n: flaot}}}}}", "did you mean 'float'"),
        (f"{{mine: {{logic: '{tmp_path}/a.py:B', subscribes: {{metrics: queue}}}}}}", "has no 'B'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            load_config(ROOT / "examples/sort_digits/config.yaml", [f"roles={broken}"])


def test_O1_a_key_that_is_written_twice_is_an_error_with_both_lines(tmp_path):
    path = write(tmp_path)
    path.write_text(path.read_text() + "seed: 1\nseed: 2\n")
    with pytest.raises(ConfigError, match=r"'seed' is written twice, in lines \d+ and \d+: leave one"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"--set 'data=.*'prompt' is written twice"):
        load_config(write(tmp_path), ["data={path: a, mapping: {prompt: a, prompt: b}}"])


@pytest.mark.parametrize("override", ["batch.samples=[1", "run_id={", "run_id=a: b: c", "run_id=!x 5"])
def test_O1_what_is_no_yaml_behind_set_is_said_with_the_option(tmp_path, override):
    with pytest.raises(ConfigError, match=r"^--set .*what stands behind = is not YAML"):
        load_config(write(tmp_path), [override])


def test_what_this_host_gives_to_mooncake_may_be_less_where_others_give_too(tmp_path):
    part = {"kind": "mooncake", "capacity_bytes": 1 << 30, "mooncake": {"segment_bytes": 1 << 29}}
    assert load_config(write(tmp_path, store=part, hosts=["10.0.0.2"])).store.mooncake.segment_bytes == 1 << 29
    nothing = {"kind": "mooncake", "mooncake": {"segment_bytes": 0, "master": "10.0.0.2:50051"}}
    assert load_config(write(tmp_path, store=nothing)).store.mooncake.segment_bytes == 0
