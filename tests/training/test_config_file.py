import dataclasses
import json
import pathlib

import pytest

from echo_jax.models import DecoderConfig
from echo_jax.training import (
    CheckpointConfig,
    DataConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
    load_config,
    save_config,
)
from echo_jax.training.config_file import changed_fields, to_dict
from echo_jax.wire import WireFormat

OTHER = TrainConfig(
    model=DecoderConfig(num_layers=2, dtype="bfloat16", qk_norm=True),
    data=DataConfig(path=pathlib.Path("some/text"), batch_size=12),
    optimizer=OptimizerConfig(schedule="wsd", accumulate=3, clip=2.0),
    mesh=MeshConfig(data_ranks=2, tensor_ranks=2, simulated=True),
    checkpoint=CheckpointConfig(folder=pathlib.Path("kept"), every=5),
    format=WireFormat(bits=3),
    variants=("forward-only", "edges"),
    steps=20,
    log_every=4,
    steps_per_call=1,
    tensorboard=True,
)


@pytest.mark.parametrize("config", [TrainConfig(), OTHER], ids=["default", "other"])
def test_every_field_survives_a_file(tmp_path, config):
    save_config(config, tmp_path / "config.json")
    assert load_config(tmp_path / "config.json") == config


def test_a_part_of_the_fields_is_enough(tmp_path):
    (tmp_path / "c.json").write_text('{"steps": 7, "optimizer": {"clip": 2}}')
    config = load_config(tmp_path / "c.json")
    assert (config.steps, config.optimizer.clip) == (7, 2.0)
    assert config.model == DecoderConfig()


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"step": 7}, "no field 'step'.*steps"),
        ({"optimizer": {"lr": 1.0}}, "optimizer has no field 'lr'.*learning_rate"),
        ({"steps": "7"}, "steps='7' must be int"),
        ({"steps": True}, "steps=True must be int"),
        ({"steps": 0}, "steps=0"),
        ({"mesh": 8}, "mesh must be an object"),
        ({"data": {"path": 3}}, "data.path=3 must be"),
        ({"variants": ["exact", "best"]}, "variants='best' must be"),
        ({"variants": "exact"}, "variants='exact' must be a list"),
        ([], "must be an object"),
    ],
)
def test_a_wrong_file_is_refused_by_field(tmp_path, entries, words):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=words) as error:
        load_config(path)
    assert str(path) in str(error.value)


def test_an_unreadable_file(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        load_config(tmp_path / "missing.json")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        load_config(tmp_path / "broken.json")


def test_changes_are_named_but_for_what_may_change():
    before = TrainConfig(data=DataConfig(path=pathlib.Path("a")))
    free = dataclasses.replace(
        before,
        data=DataConfig(path=pathlib.Path("b")),
        mesh=MeshConfig(data_ranks=4, tensor_ranks=1),
        checkpoint=CheckpointConfig(every=3),
        log_every=7,
        model=dataclasses.replace(before.model, attention="xla", unroll=4),
    )
    assert changed_fields(to_dict(before), to_dict(free)) == []
    bound = dataclasses.replace(before, seed=3, format=WireFormat(bits=8))
    assert changed_fields(to_dict(before), to_dict(bound)) == [
        "format.bits was 4, is 8",
        "seed was 0, is 3",
    ]
