"""Sets up the servers that ours is measured against, each in its own folder and environment.

A peer is a list of steps; a step that has succeeded leaves a file in `done/` that holds what it
did, so a second call does only what is missing or has changed. A failing step ends its own peer
with the reason and leaves the others alone. Packages come from whatever index pip is configured
for; weights come from files on this machine. The recipes themselves are in `peers_recipes`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from specserve_loadgen.errors import LoadgenError

Say = Callable[[str], None]

STEP_TIMEOUT = 5400  # seconds: a C++ build of 200 files on two busy cores
LOG_TAIL_LINES = 6


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to do in a peer's folder.

    what: shown to the user, and the step's identity together with its place
    argv: a command to run there, or () where `act` does the work
    act: called with the peer's folder
    """

    what: str
    argv: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    act: Callable[[Path], None] | None = None

    @property
    def fingerprint(self) -> str:
        """Changes when the step's command does: the step is then done again."""
        act = "" if self.act is None else self.act.__name__
        return "\n".join((self.what, *self.argv, act)) + "\n"


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How one peer is set up in its folder, `name` below the cache folder."""

    name: str
    steps: tuple[Step, ...]


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one recipe. reason: None where every step is done."""

    name: str
    num_run: int  # steps done by this call
    num_steps: int
    seconds: float
    reason: str | None = None


def default_cache() -> Path:
    """Where the peers live unless --cache says otherwise."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "specserve" / "peers"


def install(recipes: Sequence[Recipe], cache: Path, say: Say) -> list[Installed]:
    """Run every recipe in turn; one that fails does not stop the rest."""
    return [_install_one(recipe, cache / recipe.name, say) for recipe in recipes]


def is_installed(recipe: Recipe, cache: Path) -> bool:
    """Whether every step of the recipe, as it reads now, has been done."""
    folder = cache / recipe.name
    return all(_is_done(folder, idx, step) for idx, step in enumerate(recipe.steps))


def _install_one(recipe: Recipe, folder: Path, say: Say) -> Installed:
    started = time.monotonic()
    num_run = 0
    reason = None
    (folder / "done").mkdir(parents=True, exist_ok=True)
    for idx, step in enumerate(recipe.steps):
        where = f"{recipe.name} [{idx + 1}/{len(recipe.steps)}] {step.what}"
        if num_run == 0 and _is_done(folder, idx, step):
            say(f"{where}: done before")
            continue
        say(f"{where} ...")
        step_started = time.monotonic()
        try:
            _run(step, folder)
        except (LoadgenError, OSError) as error:
            reason = f"{step.what}: {error}"
            say(f"{where}: FAILED: {error}")
            break
        # What follows a step that ran again is done again: it may depend on it.
        _done_file(folder, idx).write_text(step.fingerprint, encoding="utf-8")
        num_run += 1
        say(f"{where}: {time.monotonic() - step_started:.0f} s")
    return Installed(
        name=recipe.name,
        num_run=num_run,
        num_steps=len(recipe.steps),
        seconds=time.monotonic() - started,
        reason=reason,
    )


def _done_file(folder: Path, idx: int) -> Path:
    return folder / "done" / f"{idx:02d}"


def _is_done(folder: Path, idx: int, step: Step) -> bool:
    try:
        return _done_file(folder, idx).read_text(encoding="utf-8") == step.fingerprint
    except OSError:
        return False


def _run(step: Step, folder: Path) -> None:
    """LoadgenError with the last lines of the command's output where it fails."""
    if step.act is not None:
        step.act(folder)
    if not step.argv:
        return
    log = folder / "install.log"
    if shutil.which(step.argv[0]) is None:
        raise LoadgenError(f"the command {step.argv[0]} is not there: install it")
    with log.open("a+b") as output:
        output.write(f"\n$ {' '.join(step.argv)}\n".encode())
        output.flush()
        begin = output.tell()
        try:
            status = subprocess.run(  # noqa: S603 # the recipes' own commands, no shell
                step.argv,
                cwd=folder,
                env={**os.environ, **step.env},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=STEP_TIMEOUT,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            raise LoadgenError(f"not done after {STEP_TIMEOUT} s (see {log})") from None
        output.seek(begin)
        said = output.read().decode(errors="replace").strip().splitlines()
    if status != 0:
        tail = " | ".join(line.strip() for line in said[-LOG_TAIL_LINES:])
        raise LoadgenError(f"exit code {status}: {tail} (all of it in {log})")
