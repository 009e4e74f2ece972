"""How much memory this process may still take on its machine, inside whatever container it runs in."""

import os
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def available_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Bytes: what the system has available, or what the limits of our control groups leave, if less."""
    return min([_system_available(proc), *_cgroup_rooms(proc, cgroups)])


def _system_available(proc: Path) -> int:
    meminfo = proc / "meminfo"
    if not meminfo.is_file():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _cgroup_rooms(proc: Path, cgroups: Path) -> list[int]:
    """What each limited control group of ours leaves, the innermost first."""
    membership = proc / "self" / "cgroup"
    if not membership.is_file():
        return []
    rooms = []
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            rooms += _rooms(cgroups, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            rooms += _rooms(
                cgroups / "memory",
                path,
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
    return rooms


def _rooms(root: Path, path: str, limit_file: str, usage_file: str, reclaimable: str) -> list[int]:
    """The rooms of a group and of those around it; inside a container, it may be the root that is visible."""
    group = root / path.lstrip("/")
    rooms = []
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            break
        limit, usage = _read(folder / limit_file), _read(folder / usage_file)
        if limit.isdigit() and usage.isdigit():
            stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            rooms.append(max(0, int(limit) - int(usage) + int(stat.get(reclaimable, 0))))
    return rooms


def _read(file: Path) -> str:
    """The content without the final newline; empty where there is none to read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
