"""The command line: what it refuses, what it says, how it exits."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from specserve.cli import build_parser, main
from specserve.options import EngineOptions, ServeOptions


def test_every_option_has_a_flag_with_its_default() -> None:
    parsed = vars(build_parser().parse_args(["serve"]))
    defaults = ServeOptions()
    for name in ServeOptions.__struct_fields__:
        assert parsed[name] == getattr(defaults, name), name
    assert set(EngineOptions.__struct_fields__) < set(ServeOptions.__struct_fields__)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["serve", "--model", "./nowhere"], "nowhere"),
        (["serve", "--drafters", "telepathy"], "known drafters are"),
        (["serve", "--max-num-batched-tokens", "4"], "--max-num-seqs"),
        (["serve", "--max-num-seqs", "0"], "--max-num-seqs is 0"),
        (["serve", "--block-size", "0"], "--block-size is 0"),
        (["serve", "--draft-tokens", "99"], "--draft-tokens is 99"),
        (["serve", "--drafters", "draft_model"], "draft_model:PATH"),
        (["serve", "--backend", "magic"], "magic"),
        (["serve", "--kv-cache-gb", "nan"], "--kv-cache-gb is nan"),
        (["serve", "--memory-gb", "-1"], "--memory-gb is -1"),
        (["serve", "--port", "99999"], "--port is 99999"),
        (["serve", "--host", "256.1.1.1"], "--host '256.1.1.1'"),
        (["serve", "--drain-seconds", "-1"], "--drain-seconds is -1"),
        (["serve", "--api-key-file", "/nowhere/keys"], "--api-key-file /nowhere/keys cannot be"),
        (["serve", "--max-concurrent-per-key", "4"], "no keys: give --api-key-file or SPECSERVE_"),
        (["serve", "--max-concurrent-per-key", "0"], "--max-concurrent-per-key is 0"),
        (["serve", "--sse-keepalive-seconds", "nan"], "--sse-keepalive-seconds is nan"),
        (["serve", "--max-connections", "0"], "--max-connections is 0"),
        (["serve", "--max-connections", "999999999"], "ulimit -n"),
        (["serve", "--ssl-keyfile", "key.pem"], "without --ssl-certfile"),
        (["serve", "--ssl-certfile", "/nowhere.pem"], "--ssl-certfile /nowhere.pem and --ssl-key"),
        (["serve", "--max-waiting-tokens", "0"], "--max-waiting-tokens is 0"),
        (["serve", "--cors-origins", "localhost"], "--cors-origins has 'localhost'"),
        (["serve", "--otlp-endpoint", "not a url"], "--otlp-endpoint"),
        (["serve", "--trace-file", "/nowhere/at/all"], "--trace-file"),
        (["pull", "./nowhere"], "nowhere"),
        (["trace"], "usage: specserve trace FILE"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line_and_exits_with_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[0] == "serve" and "--port" not in arguments:
        arguments = [*arguments, "--port", "0"]
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "Traceback" not in err


def test_help_answers_without_loading_torch() -> None:
    code = (
        "import sys; from specserve.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.endswith("False\n"), done.stderr
    assert "serve a model over HTTP" in done.stdout


@pytest.mark.demo
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--max-model-len", "100000"], "--max-model-len is 100000"),
        (["--kv-cache-gb", "0.0001", "--drafters", "none"], "no KV block fits"),
    ],
)
def test_what_only_the_loaded_model_shows_is_said_too(
    demo_model_dir: object, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--port", "0", *options]) == 2
    assert said in capsys.readouterr().err


def test_a_port_in_use_is_named_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port), "--model", "./nowhere"]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
