"""What Linux says of a server's processes and of the machine: memory, CPU time, who is busy."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import msgspec

PROC = Path("/proc")
INTERESTING_FLAGS = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
)


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a process tree. Pages that several of its processes share count once for each."""

    resident: int  # sum of VmRSS
    peak: int  # sum of VmHWM, each process at its own worst moment


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The machine of a report."""

    cpu_model: str
    cpu_flags: tuple[str, ...]  # of those that decide how fast a matrix product is
    num_cores: int  # that this process may use
    memory_bytes: int
    system: str
    python: str


class _Process(msgspec.Struct, frozen=True):
    pid: int
    parent: int
    group: int


def _processes() -> list[_Process]:
    """All that run now; a zombie has ended."""
    found = []
    for entry in PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue  # it ended while we looked
        # A name may hold spaces and parentheses.
        state, parent, group, *_ = stat.rpartition(")")[2].split()
        if state not in "ZX":
            found.append(_Process(int(entry.name), int(parent), int(group)))
    return found


def process_tree(root: int) -> list[int]:
    """The process and all that descend from it, as far as they still run."""
    children: dict[int, list[int]] = {}
    for process in (running := _processes()):
        children.setdefault(process.parent, []).append(process.pid)
    tree, left = [], [root] if any(process.pid == root for process in running) else []
    while left:
        pid = left.pop()
        tree.append(pid)
        left += children.get(pid, [])
    return tree


def group_members(group: int) -> list[int]:
    """The processes of a process group that still run."""
    return [process.pid for process in _processes() if process.group == group]


def memory_of(root: int) -> Memory:
    """Memory of the process tree under `root`; zeros where it has ended."""
    resident = peak = 0
    for pid in process_tree(root):
        fields = _status(pid)
        resident += fields.get("VmRSS", 0)
        peak += fields.get("VmHWM", 0)
    return Memory(resident=resident, peak=peak)


def _status(pid: int) -> dict[str, int]:
    """The fields of /proc/PID/status that are in kB, in bytes."""
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.partition(":") for line in lines)
    return {name: int(value.split()[0]) * 1024 for name, _, value in pairs if value.endswith(" kB")}


def cpu_seconds(root: int) -> float:
    """CPU time that the process tree has used so far, in seconds."""
    ticks = 0
    for pid in process_tree(root):
        try:
            fields = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])  # utime, stime
    return ticks / os.sysconf("SC_CLK_TCK")


def busy_cores(seconds: float) -> float:
    """How many cores all processes together kept busy during the next `seconds`; blocks."""
    before = _busy_ticks()
    started = time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - started
    return (_busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / elapsed


def _busy_ticks() -> int:
    user, nice, system, _idle, _iowait, *rest = (
        int(field) for field in (PROC / "stat").read_text().splitlines()[0].split()[1:]
    )
    return user + nice + system + sum(rest[:3])  # irq, softirq, steal


def describe_machine() -> Environment:
    """The machine that this process runs on."""
    cpu: dict[str, str] = {}
    for line in (PROC / "cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        cpu.setdefault(name.strip(), value.strip())
    flags = cpu.get("flags", "").split()
    return Environment(
        cpu_model=cpu.get("model name", "unknown"),
        cpu_flags=tuple(flag for flag in INTERESTING_FLAGS if flag in flags),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
    )
