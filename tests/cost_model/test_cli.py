"""``echo-jax advise`` says what the cost model says."""

import dataclasses
import json
import re

import pytest

from echo_jax import EchoConfig, WireFormat, cli, cli_advise
from echo_jax.cost_model import (
    CodecSpeed,
    CostModel,
    ExactSpeed,
    Link,
    Message,
    advise,
    project,
)
from tests.cost_model.models import LAN


@pytest.fixture
def calibration(tmp_path):
    """A saved calibration."""
    path = tmp_path / "lan.json"
    LAN.save(path)
    return path


def said(capsys, *arguments) -> str:
    """What the command prints, in one line."""
    assert cli.main(["advise", *map(str, arguments)]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_settings_and_gain_are_those_of_the_model(calibration, capsys):
    sizes = (1 << 12, 1 << 24)
    messages = [Message(message_bytes=size) for size in sizes]
    advice = advise(LAN, messages)
    text = said(capsys, "--load", calibration, "--sizes", *sizes, "--compute-ms", "100")
    assert "over 4 ranks (here)" in text
    config = f"EchoConfig(min_bytes={advice.min_bytes}, num_chunks={advice.num_chunks})"
    assert config in text
    assert f"First token: {advice.gain(compute_seconds=0.1):.2f} times" in text
    text = said(capsys, "--load", calibration, "--sizes", *sizes, "--share", "0.4")
    assert f"All of it: {advice.gain_of_share(0.4):.2f} times" in text


def test_a_burst_that_is_given_is_that_of_the_link(calibration, capsys):
    """Under it the exact sum is as quick as on a link without a limit."""
    link = dataclasses.replace(LAN.link, burst_bytes=1 << 20)
    exact = dataclasses.replace(LAN, link=link).exact_seconds(1 << 18)
    assert exact < LAN.exact_seconds(1 << 18) / 2
    arguments = ("--load", calibration, "--sizes", 1 << 18)
    text = said(capsys, *arguments, "--burst-bytes", 1 << 20)
    assert f"│ 1 │ {1e3 * exact:.3g} │" in text
    assert f"│ 1 │ {1e3 * LAN.exact_seconds(1 << 18):.3g} │" in said(capsys, *arguments)


def test_where_few_bits_do_not_pay_it_says_so(calibration, capsys):
    text = said(capsys, "--load", calibration, "--sizes", "4096", "--share", "0.5")
    assert "Few bits do not pay for these messages: EchoConfig().exact()" in text
    assert "All of it: 1.00 times" in text


def printed(text: str) -> EchoConfig:
    """The configuration that the command has printed, evaluated."""
    found = re.search(
        r"EchoConfig\(.*\)(?=: smaller)|EchoConfig\(.*\)\.exact\(\)", text
    )
    return eval(found[0], {"EchoConfig": EchoConfig, "WireFormat": WireFormat})


@pytest.mark.parametrize(
    ("arguments", "config"),
    [
        ([], EchoConfig()),
        (
            ["--bits", "3", "--no-feedback", "--residual-dtype", "int8"],
            EchoConfig(
                format=WireFormat(bits=3), feedback=False, residual_dtype="int8"
            ),
        ),
        (
            ["--block-size", "16", "--no-rotate", "--algorithm", "one-shot"],
            EchoConfig(
                format=WireFormat(block_size=16, rotate=False), algorithm="one-shot"
            ),
        ),
        (["--backend", "xla"], EchoConfig(backend="xla")),
    ],
)
@pytest.mark.parametrize("size", [1 << 12, 1 << 30])
def test_what_is_printed_evaluates_to_what_is_advised(arguments, config, size, capsys):
    given = ("--machine", "h200", "--ranks", "2", "--sizes", size)
    text = said(capsys, *given, *arguments)
    times = project("h200", 2, config=config)
    advice = advise(times, [Message(message_bytes=size)])
    assert advice.path == ("exact" if size == 1 << 12 else "echo")
    assert printed(text) == advice.configure(config)


def test_the_settings_that_were_calibrated_are_printed(tmp_path, capsys):
    path = tmp_path / "three.json"
    config = EchoConfig(format=WireFormat(bits=3), residual_dtype="int4")
    model = dataclasses.replace(LAN, config=config)
    model.save(path)
    advice = advise(model, [Message(message_bytes=1 << 26)])
    text = said(capsys, "--load", path, "--sizes", 1 << 26)
    assert "EchoConfig(format=WireFormat(bits=3), min_bytes=" in text
    assert printed(text) == advice.configure(config)
    # Options that say what was calibrated change nothing, and are not refused.
    again = ("--bits", 3, "--residual-dtype", "int4", "--tensor-ranks", 4)
    assert said(capsys, "--load", path, "--sizes", 1 << 26, *again) == text


def test_the_algorithm_that_was_calibrated_is_among_the_settings(tmp_path, capsys):
    path = tmp_path / "once.json"
    once = EchoConfig(algorithm="one-shot")
    dataclasses.replace(LAN, config=once).save(path)
    text = said(capsys, "--load", path, "--sizes", str(1 << 26))
    assert 'algorithm="one-shot"' in text


def test_a_model_brings_its_messages(calibration, tmp_path, capsys):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 512,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "torch_dtype": "float16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["--load", calibration, "--model", tmp_path, "--length", "1024"]
    text = said(capsys, *arguments, "--batch", "8", "--step-compute-ms", "50")
    message = Message(message_bytes=8 * 1024 * 256 * 2, calls=12)
    assert f"{message.message_bytes:,} B │ 12 │" in text
    step = Message(message_bytes=message.message_bytes, calls=24)
    gain = advise(LAN, [step]).gain(compute_seconds=0.05)
    assert f"Step: {gain:.2f} times" in text


def test_a_machine_is_assumed_and_said_to_be(capsys):
    text = said(capsys, "--machine", "a100", "--ranks", "64", "--ethernet-gbit", "100")
    assert "over 64 ranks" in text
    assert "assumed: a100" in text


def test_a_mesh_is_calibrated_and_saved(tmp_path, monkeypatch, capsys):
    """On two simulated devices; the sizes are made smaller to be quick."""
    monkeypatch.setattr(cli_advise, "SIZES", (1 << 12, 1 << 14))
    path = tmp_path / "here.json"
    text = said(capsys, "--tensor-ranks", "2", "--save", path, "--sizes", "65536")
    assert "over 2 ranks (here)" in text
    found = CostModel.load(path)
    assert found.ranks == 2
    assert found.dtype == "float16"
    assert "65,536 B" in said(capsys, "--load", path, "--sizes", "65536")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tensor-ranks", "1"], "1 rank has nothing to sum"),
        (["--sizes", "0"], "sizes=(0,) must hold bytes"),
        (["--length", "0"], "length=0"),
        (["--share", "2"], "share=2.0 must lie in 0 to 1"),
        (["--share", "0.1", "--compute-ms", "1"], "not both"),
        (["--compute-ms", "-1"], "must be at least 0"),
        (["--sizes", "4", "--model", "somewhere"], "give sizes or a model"),
        (["--load", "lan.json", "--machine", "h200"], "a calibration (load) or"),
        (["--load", "lan.json", "--save", "a.json"], "nothing is measured"),
        (["--load", "missing.json"], "missing.json"),
        (["--ranks", "12"], "here give tensor_ranks"),
        (["--burst-bytes", "-1"], "burst_bytes=-1 must be at least 0"),
        (["--burst-bytes", "1", "--machine", "h200"], "assumed machines have none"),
        (["--machine", "h200", "--ranks", "12"], "ranks=12 must fill nodes"),
        (["--model", "missing"], "missing does not exist"),
        (["--load", "lan.json", "--dtype", "float32"], "was calibrated for float16"),
        (["--load", "lan.json", "--algorithm", "one-shot"], "algorithm=one-shot"),
        (
            [
                *("--load", "lan.json", "--bits", "8", "--block-size", "16"),
                *("--tensor-ranks", "8"),
            ],
            "lan.json was not calibrated with tensor_ranks=8, bits=8, block_size=16: "
            "leave this away, calibrate again without load, or assume a machine",
        ),
        (["--load", "lan.json", "--path", "exact"], "with path=exact: leave"),
        (["--load", "lan.json", "--no-rotate"], "with rotate=False: leave"),
        (["--load", "lan.json", "--no-feedback"], "with feedback=False: leave"),
        (["--load", "lan.json", "--min-bytes", "0"], "with min_bytes=0: leave"),
        (["--load", "lan.json", "--num-chunks", "4"], "with num_chunks=4: leave"),
        (["--load", "lan.json", "--backend", "xla"], "with backend=xla: leave"),
        (["--load", "lan.json", "--device", "cpu"], "with device=cpu: leave"),
        (["--load", "lan.json", "--coordinator", "auto"], "with coordinator=auto"),
        (["--load", "lan.json", "--ethernet-gbit", "9"], "with ethernet_gbit=9.0"),
        (["--load", "lan.json", "--ranks-per-node", "2"], "with ranks_per_node=2"),
        (["--min-bytes", "0"], "leave min_bytes=0 away, since advise finds"),
        (
            ["--machine", "h200", "--path", "exact", "--num-chunks", "2"],
            "leave path=exact, num_chunks=2 away, since advise",
        ),
        (["--ethernet-gbit", "9"], "leave ethernet_gbit=9.0 away, or give the machine"),
        (["--ranks-per-node", "4"], "leave ranks_per_node=4 away, or give the"),
        (
            ["--machine", "h200", "--tensor-ranks", "8"],
            "leave tensor_ranks=8 away, since with a machine",
        ),
        (
            ["--machine", "h200", "--coordinator", "auto"],
            "leave coordinator=auto away, since",
        ),
        (["--load", "lan.json", "--margin", "-1"], "margin=-1.0"),
        (["--load", "lan.json", "--margin", "nan"], "margin=nan"),
        (["--compute-ms", "nan"], "must be at least 0, and finite"),
        (["--machine", "h200", "--ranks", "0"], "ranks=0 must fill nodes"),
    ],
)
@pytest.mark.usefixtures("calibration", "as_shipped")
def test_it_says_clearly_what_is_wrong(arguments, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        code = cli.main(["advise", *arguments])
    except SystemExit as end:  # the parser's own way
        code = end.code
    assert code == 2
    assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_sums_that_take_no_time_gain_without_end(tmp_path, capsys):
    """The burst lets the codes pass at once, and the codec is counted as free."""
    link = Link(latency_seconds=0.0, bytes_per_second=1e9, burst_bytes=1 << 18)
    codec = CodecSpeed(piece_seconds=0.0, value_seconds=0.0)
    free = CostModel(ranks=4, link=link, exact=ExactSpeed(), codec=codec)
    free.save(tmp_path / "free.json")
    arguments = ("--load", tmp_path / "free.json", "--sizes", 1 << 18)
    assert "First token: inf times" in said(capsys, *arguments, "--compute-ms", "0")
    assert "All of it: 2.00 times" in said(capsys, *arguments, "--share", "0.5")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ranks": 0}, "ranks=0 must be an int"),
        ({"ranks": 4.5}, "ranks=4.5 must be an int"),
        ({"link": "ab"}, "sequence element"),
        ({"exact": {"tree": "no"}}, "tree='no' must be a bool"),
        ({"dtype": "int8"}, "dtype int8"),
    ],
)
@pytest.mark.usefixtures("as_shipped")
def test_a_calibration_with_a_wrong_value_is_named(calibration, change, words):
    entries = {**json.loads(calibration.read_text()), **change}
    calibration.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=rf"lan\.json holds no cost model: .*{words}"):
        CostModel.load(calibration)
    calibration.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"lan\.json holds no cost model"):
        CostModel.load(calibration)
