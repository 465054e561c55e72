"""From YAML and overrides to a config, with every problem at once."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_td.config.base import roles
from roll_td.config.load import check_config, load, resolved_yaml
from roll_td.config.schema import ConfigError


def _write(workdir: Path, text: str, name: str = "exp.yaml") -> Path:
    (workdir / name).write_text(text)
    return workdir / name


def _load(workdir: Path, text: str, *overrides: str) -> Any:
    return load(_write(workdir, text), overrides)


def _errors(workdir: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        _load(workdir, text, *overrides)
    assert str(caught.value).splitlines()[0] == f"{workdir / 'exp.yaml'}:"
    return str(caught.value).splitlines()[1:]


MINE = "pipeline_cls: user_code.Annotated\n"
PLAIN = "pipeline_cls: user_code.Plain\n"


def test_the_class_of_the_pipeline_is_filled(workdir: Path) -> None:
    config = _load(workdir, MINE + "student: {device_mapping: 0-3}\nrewards: {a: {world_size: 1}}")
    assert type(config).__name__ == "MyConfig"
    assert config.exp_name == "exp"
    assert config.student.worker_cls == "user_code.MyWorker"
    assert config.num_gpus_per_node == 4
    assert list(roles(config)) == ["student", "a"]


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_overrides_reach_fields_that_the_yaml_lacks(workdir: Path, prefix: str) -> None:
    overrides = ("learning_rate=1e-6", "student.timeout_s=5", "rewards.math.world_size=2")
    config = _load(workdir, MINE, *(prefix + text for text in overrides))
    assert (config.learning_rate, config.student.timeout_s) == (1e-6, 5.0)
    assert config.rewards["math"].world_size == 2


def test_overrides_change_and_remove_what_the_yaml_has(workdir: Path) -> None:
    text = MINE + "seed: 1\nlearning_rate: 2.0\nstudent: {device_mapping: [0, 1]}"
    config = _load(workdir, text, "seed=7", "~learning_rate", "student.device_mapping=0-2")
    assert (config.seed, config.learning_rate) == (7, 1e-3)
    assert config.student.device_mapping == [0, 1, 2]


def test_config_groups_are_hydras(workdir: Path) -> None:
    (workdir / "tracker").mkdir()
    _write(workdir, "url: one", "tracker/a.yaml")
    _write(workdir, "url: two", "tracker/b.yaml")
    text = "defaults: [{tracker: a}, _self_]\n" + MINE
    assert _load(workdir, text).tracker.url == "one"
    assert _load(workdir, text, "tracker=b").tracker.url == "two"
    assert _load(workdir, text, "tracker=b", "tracker.url=three").tracker.url == "three"


@pytest.mark.parametrize("pipeline", ["Plain", "MyWorker"])
def test_without_a_config_class_every_section_is_a_role(workdir: Path, pipeline: str) -> None:
    text = f"pipeline_cls: user_code.{pipeline}\nb: {{world_size: 2}}\na: {{device_mapping: 0}}"
    config = _load(workdir, text, "c.world_size=1")
    assert list(roles(config)) == ["b", "a", "c"]
    assert config.a.name == "a"
    copy = pickle.loads(pickle.dumps(config))
    assert (copy.a, copy.num_cpu_ranks_per_node) == (config.a, 3)
    assert list(roles(copy)) == ["b", "a", "c"]


def test_without_a_config_class_the_rest_is_strict(workdir: Path) -> None:
    text = PLAIN + "a: {device_maping: 0}\nsed: 3\nmy-role: {world_size: 1}"
    assert _errors(workdir, text) == [
        "my-role: can't be the name of a role; use letters, digits and _",
        "sed: is not a key at the top level; did you mean seed?",
        "a.device_maping: is not a key of section a; did you mean device_mapping?",
    ]


def test_config_cls_of_the_yaml_wins(workdir: Path) -> None:
    config = _load(workdir, PLAIN + "config_cls: user_code.MyConfig")
    assert type(config).__name__ == "MyConfig"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 3", "pipeline_cls: is missing; set the dotted path of the class"),
        ("pipeline_cls: 3", "pipeline_cls=3: must be str or null, is int"),
        ("pipeline_cls: user_code.Plan", "did you mean user_code.Plain?"),
        ("pipeline_cls: user_code.NoConfig", "is not a BaseConfig; derive it from BaseConfig"),
        ("pipeline_cls: user_code.NoDataclass", "is no dataclass; put @dataclass above it"),
        (PLAIN + "config_cls: user_code.MyConfg", "config_cls='user_code.MyConfg'"),
        (PLAIN + "seed: ???", "seed='???': must be given; set it"),
        (PLAIN + "exp_name: ${nowhere}", "exp_name: Interpolation key 'nowhere' not found"),
        (PLAIN + "a: [1, 2", "not readable as YAML in line 2"),
        (PLAIN + "defaults: [{model: small}, _self_]", "Could not find 'model/small'"),
    ],
)
def test_single_problems(workdir: Path, text: str, message: str) -> None:
    (error,) = _errors(workdir, text)
    assert message in error


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learning_rat=1", "did you mean learning_rate?"),
        ("+x.y=1", "x: is not a key at the top level"),
        ("+student.seed=1", "the right key is seed"),
        ("student.learning_rate=1", "the right key is student.training.learning_rate"),
        ("seed=1,2", "is several values; write a list as seed=[…]"),
        ("student.device_mapping=list(range(0,2))", "Hydra can't read this override"),
        ("~nothing", "nothing"),
        ("=1", "Hydra can't read this override"),
        ("seed", "Hydra can't read this override"),
        ("a..b=1", "Hydra can't read this override"),
        ("exp_name=1", "exp_name=1: must be str or null, is int; write it in quotes"),
        ("exp_name=a=b", "write key=value or 'key=\"value\"'"),
        ("tracker.url=null", "tracker.url=None: must be str, is null"),
        ("use_cls_token=1", "use_cls_token=1: must be bool, is int"),
        ("learning_rate=fast", "learning_rate='fast': must be float, is str"),
        ("seed=1.0", "seed=1.0: must be int, is float"),
        ("student.device_mapping=1.5", "device_mapping=1.5: must be list[int] or str or int"),
        ("student.device_mapping=[]", "student.device_mapping=[]: names no device"),
        ("student.device_mapping=0-3,6", "is several values"),
        ("student.timeout_s=inf", "student.timeout_s=inf: must be above 0 and at most"),
        ("student.timeout_s=nan", "student.timeout_s=nan: must be above 0"),
        ("rewards.math=3", "rewards.math=3: must be a section of WorkerConfig fields, is int"),
        ("rewards.math.optim.lr=1", "rewards.math.optim: is not a key of section rewards.math"),
        ("num_gpus_per_node=-1", "must be a whole number of at least 0"),
    ],
)
def test_c06_wrong_overrides(workdir: Path, override: str, message: str) -> None:
    (error,) = _errors(workdir, MINE, override)
    assert message in error


@pytest.mark.parametrize(
    "override", ["student.hosts.2=1", "student.hosts.x.y=1", "~student.hosts.0"]
)
def test_an_override_that_names_no_item_of_a_list(workdir: Path, override: str) -> None:
    (error,) = _errors(workdir, MINE + "student: {hosts: [a, {b: 1}]}", "seed=1", override)
    assert error.startswith(f"{override.partition('=')[0]}=")
    assert "student.hosts is a list of 2; write student.hosts.N with N below 2, or" in error


def test_what_a_run_is_to_go_on_from_has_to_be_there(workdir: Path) -> None:
    def problems(resume: str) -> list[str]:
        config = _load(workdir, PLAIN + f"output_dir: {workdir}", f"resume={resume}")
        return [str(problem) for problem in config.outside_problems()]

    assert problems("auto") == problems("none") == problems(str(workdir)) == []
    (said,) = problems("elsewhere/step_4")
    assert said.startswith("resume='elsewhere/step_4': there is no such folder; set auto, none")
    (workdir / "exp" / "checkpoints" / "step_8").mkdir(parents=True)
    assert problems("elsewhere/step_4") == [], "a requeued run goes on from its own"


def test_where_a_run_writes_has_to_be_a_folder(workdir: Path) -> None:
    (workdir / "file").write_text("")
    for place, wrong in ("new/er", ""), ("file", "file"), ("file/in/it", "file"):
        config = _load(workdir, PLAIN, f"output_dir={workdir / place}")
        found = [str(problem) for problem in config.outside_problems()]
        said = f"output_dir='{workdir / place}/exp': {workdir / wrong} is no folder; name a folder"
        assert [text[: len(said)] for text in found] == ([said] if wrong else [])
    assert not (workdir / "new").exists()


@pytest.mark.parametrize(
    ("override", "devices"),
    [
        ("[0,1]", [0, 1]),
        ("0-3", [0, 1, 2, 3]),
        ("'0-1,3'", [0, 1, 3]),
        ("3", [3]),
        ("'list(range(2,0,-1))'", [2, 1]),
        ("null", None),
    ],
)
def test_device_mapping_on_the_command_line(
    workdir: Path, override: str, devices: list[int] | None
) -> None:
    config = _load(workdir, MINE, f"student.device_mapping={override}")
    assert config.student.device_mapping == devices


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("'a b'", "a b"),
        ('"it\'s"', "it's"),
        ("", ""),
        ("'1'", "1"),
        ("'日本'", "日本"),
        ("a:b", "a:b"),
        ("'a=b,c'", "a=b,c"),
        ("null", "exp"),
    ],
)
def test_text_on_the_command_line(workdir: Path, override: str, name: str) -> None:
    assert _load(workdir, MINE, f"exp_name={override}").exp_name == name


def test_c06_unknown_keys_at_every_level(workdir: Path) -> None:  # C06
    text = MINE + (
        "w: 1\nstudent: {world_sise: 1}\ntracker: {api_kye: x}\n"
        "rewards: {a: {world_size: 1, nme: x}, b: {tmeout_s: 1}}\n1: 2"
    )
    assert {line.partition(":")[0] for line in _errors(workdir, text)} == {
        "w",
        "student.world_sise",
        "tracker.api_kye",
        "rewards.a.nme",
        "rewards.b.tmeout_s",
        "1",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 2", "line 3: found duplicate key seed"),
        ("student: {name: a, name: b}", "found duplicate key name"),
        ("null: 3", "Incompatible key type"),
        ("student: !!set {x}", "is not a supported primitive type"),
        ("student: !!python/object:os.system {}", "could not determine a constructor"),
        ("defaults: x", "defaults must be a list"),
        ("seed:\n\t- 1", "line 3: found character"),
        ("exp_name: no", "exp_name=False: must be str or null, is bool; write it in quotes"),
    ],
)
def test_odd_files(workdir: Path, text: str, message: str) -> None:
    (error,) = _errors(workdir, MINE + text)
    assert message in error


def test_a_file_that_is_no_utf_8(workdir: Path) -> None:
    (workdir / "exp.yaml").write_bytes(MINE.encode() + b"exp_name: \xff")
    with pytest.raises(ConfigError, match="not readable as UTF-8: invalid start byte"):
        load(workdir / "exp.yaml")
    (workdir / "bom.yaml").write_bytes(b"\xef\xbb\xbf" + MINE.encode())
    assert load(workdir / "bom.yaml").exp_name == "bom"


def test_missing_or_misnamed_file(workdir: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        load(workdir / "none.yaml")
    with pytest.raises(ConfigError, match=r"must end with \.yaml"):
        load(_write(workdir, MINE, "exp.yml"))


def test_all_problems_at_once(workdir: Path) -> None:
    text = MINE + (
        "seed: x\nnum_nodes: 0\ntransfer_timeout_s: 0\nstudent: {device_mapping: [0, 0]}\n"
        "rewards: {good: {world_size: 2}, bad: {world_size: 0, nam: x}}"
    )
    checked = check_config(_write(workdir, text))
    assert {problem.key for problem in checked.problems} == {
        "seed",
        "num_nodes",
        "transfer_timeout_s",
        "student.device_mapping",
        "rewards.bad.world_size",
        "rewards.bad.nam",
    }
    assert len(checked.problems) == 6
    assert list(checked.roles) == ["rewards.good"]
    assert (checked.config, checked.size) == (None, None)


def test_roles_are_read_although_the_pipeline_is_not_found(workdir: Path) -> None:
    text = "pipeline_cls: user_code.Plan\nseed: x\nown: 3\na: {device_mapping: 0-1, own: 1}"
    checked = check_config(_write(workdir, text))
    assert [problem.key for problem in checked.problems] == ["pipeline_cls", "seed"]
    assert checked.roles["a"].world_size == 2
    assert checked.size is not None
    assert checked.size.num_gpus_per_node == 2


SECRETS = MINE + "tracker: {api_key: S3CRET, url: 'http://user:S3CRET@host/x'}\n"


def test_c11_resolved_yaml(workdir: Path) -> None:
    text = resolved_yaml(_load(workdir, SECRETS + "use_cls_token: true\nnum_tokens: 9"))
    assert "S3CRET" not in text
    data = yaml.safe_load(text)
    assert data["tracker"] == {"api_key": "***", "url": "http://***@host/x"}
    assert (data["use_cls_token"], data["num_tokens"]) == (True, 9)


@pytest.mark.parametrize(
    ("text", "override"),
    [
        (SECRETS + "tracker.x: 1", "tracker.api_ky=S3CRET"),
        (SECRETS, "tracker.api_key=[S3CRET"),
        (SECRETS, "tracker.api_key=S3CRET,S3CRET"),
        (SECRETS, "tracker.api_key=[S3CRET]"),
        (SECRETS, "tracker.url=[http://user:S3CRET@host]"),
        ("tracker: {api_key: S3CRET: x}", "seed=1"),
    ],
)
def test_c11_errors(workdir: Path, text: str, override: str) -> None:
    errors = _errors(workdir, text, override)
    assert errors
    assert "S3CRET" not in "\n".join(errors)


def test_resolved_yaml_loads_again(workdir: Path) -> None:
    config = _load(workdir, PLAIN + "a: {device_mapping: 0-3, num_gpus_per_worker: 2}")
    again = _load(workdir, resolved_yaml(config))
    assert vars(again) == vars(config)


def test_a_role_that_the_config_class_would_have_placed_is_no_problem() -> None:
    quickstart = Path(__file__).parents[3] / "configs" / "rlvr" / "quickstart.yaml"
    role = "actor_train.strategy_args.strategy_config"
    checked = check_config(quickstart, ["algorithm.advantagee.name=x", f"{role}.shards=1"])
    assert [str(problem).partition(";")[0] for problem in checked.problems] == [
        "algorithm.advantagee: is not a key of section algorithm",
        f"{role}.shards: is not a key of section strategy_config",
    ]
    assert not checked.roles_are_final
    assert all(role.device_mapping or role.world_size for role in checked.roles.values())
