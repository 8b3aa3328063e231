"""A model of a file system that replays the system calls of a process, and shows what a power failure may leave.

`strace` records the calls, so the writes of C++ libraries are among them. Files and directories have a current content
and the one at their last fsync. After a power failure, a disk may have either, independently for each of them: file
systems differ in what they write first (Pillai et al. 2014, OSDI, "All File Systems Are Not Created Equal").
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

CALLS = (
    "open,openat,creat,write,pwrite64,writev,rename,renameat,renameat2,link,linkat,mkdir,mkdirat,rmdir,unlink,"
    "unlinkat,fsync,fdatasync,ftruncate"
)
"""The system calls to record. Others that change files make `replay` fail, since its result is compared."""


@dataclass(eq=False)
class File:
    """A file: its bytes, and those at its last fsync."""

    content: bytes = b""
    synced: bytes = b""


@dataclass(eq=False)
class Folder:
    """A directory: its entries, and those at its last fsync."""

    entries: "dict[str, File | Folder]" = field(default_factory=dict)
    synced: "dict[str, File | Folder]" = field(default_factory=dict)


Tree = dict[str, bytes | None]
"""The content of each file by its path; None for a directory."""


class Disk:
    """The files below one directory, which exists and is empty at the beginning."""

    def __init__(self, root: str) -> None:
        self.root = Folder()
        self._prefix = root

    def _walk(self, path: str) -> "tuple[Folder, str] | None":
        """Returns the directory of a path and its last name, or None if it is elsewhere."""
        if not path.startswith(self._prefix + "/"):
            return None
        *folders, name = path[len(self._prefix) + 1 :].split("/")
        folder = self.root
        for each in folders:
            below = folder.entries[each]
            assert isinstance(below, Folder)
            folder = below
        return folder, name

    def find(self, path: str) -> File | Folder | None:
        """Returns what is at a path of the root or below."""
        if path == self._prefix:
            return self.root
        place = self._walk(path)
        return None if place is None else place[0].entries.get(place[1])

    def apply(self, name: str, text: str) -> bool:
        """Does what a call that succeeded has done; returns whether it concerns this disk."""
        paths = [os.fsdecode(_unquoted(part)) for part in re.findall(r'"((?:\\x..)*)"', text)]
        folders = [os.fsdecode(_unquoted(part)) for part in re.findall(r"<((?:\\x..)+)>", text)]
        if name in ("write", "writev", "pwrite64", "fsync", "fdatasync", "ftruncate"):
            return self._change(name, folders[0] if folders else "", text)
        if name.endswith(("at", "at2")) and name != "creat":  # each path may be relative to the directory before it
            paths = [part if part.startswith("/") else f"{folders[i]}/{part}" for i, part in enumerate(paths)]
        places = [self._walk(path) for path in paths]
        if not places or places[0] is None:
            return False
        folder, last = places[0]
        if name in ("open", "openat", "creat"):
            return self._open(folder, last, name == "creat" or "O_CREAT" in text, name == "creat" or "O_TRUNC" in text)
        if name.startswith("mkdir"):
            folder.entries[last] = Folder()
        elif name.startswith(("rmdir", "unlink")):
            del folder.entries[last]
        else:
            assert places[1] is not None
            there, new = places[1]
            there.entries[new] = folder.entries[last] if name.startswith("link") else folder.entries.pop(last)
        return True

    def _open(self, folder: Folder, name: str, create: bool, truncate: bool) -> bool:
        if create and name not in folder.entries:
            folder.entries[name] = File()
            return True
        file = folder.entries[name]
        if truncate and isinstance(file, File) and file.content:
            file.content = b""
            return True
        return False

    def _change(self, name: str, path: str, text: str) -> bool:
        found = self.find(path)
        if found is None:
            return False
        if isinstance(found, Folder):
            found.synced = dict(found.entries)
        elif name in ("fsync", "fdatasync"):
            found.synced = found.content
        elif name == "ftruncate":
            size = int(text.rsplit(",", 1)[1])
            found.content = found.content[:size].ljust(size, b"\0")
        else:
            data = b"".join(map(_unquoted, re.findall(r'"((?:\\x..)*)"', text)))
            at = int(text.rsplit(",", 1)[1]) if name == "pwrite64" else len(found.content)
            found.content = found.content[:at].ljust(at, b"\0") + data + found.content[at + len(data) :]
        return True

    def tree(self, *, files: str = "kept", names: Folder | str = "kept") -> Tree:
        """Returns what the disk has.

        Args:
          files: what it has of bytes that are not synced: `kept`, `lost`, or `zero`, as many zeros.
          names: which directories have lost the entries that are not synced: none for `kept`, all for `lost`, or one.
        """
        found: Tree = {}

        def add(folder: Folder, prefix: str) -> None:
            lost = names == "lost" or names is folder
            for name, entry in (folder.synced if lost else folder.entries).items():
                if isinstance(entry, Folder):
                    found[prefix + name] = None
                    add(entry, f"{prefix}{name}/")
                else:
                    found[prefix + name] = _bytes(entry, files)

        add(self.root, "")
        return found

    def after_power_failure(self) -> Iterator[Tree]:
        """Yields what a power failure now may leave."""
        for files in ("kept", "lost", "zero"):
            yield self.tree(files=files)
            yield self.tree(files=files, names="lost")
        for folder in self._folders(self.root):
            if folder.synced != folder.entries:
                yield self.tree(names=folder)
                yield self.tree(files="lost", names=folder)

    def _folders(self, folder: Folder) -> Iterator[Folder]:
        yield folder
        for entry in folder.entries.values():
            if isinstance(entry, Folder):
                yield from self._folders(entry)


def _unquoted(text: str) -> bytes:
    """Returns the bytes that strace writes as `\\x61\\x62`."""
    return bytes.fromhex(text.replace("\\x", ""))


def _bytes(file: File, kind: str) -> bytes:
    if kind == "kept":
        return file.content
    return file.synced if kind == "lost" else file.synced.ljust(len(file.content), b"\0")


def calls(trace: Path) -> Iterator[tuple[str, str]]:
    """Yields name and arguments of each call of a trace that succeeded, when it returned.

    The arguments end before the closing bracket. A call that another thread has interrupted is written in two parts.
    """
    begun: dict[str, str] = {}
    for line in trace.read_text().splitlines():
        thread, _, text = line.partition(" ")
        text = text.strip()
        if text.endswith("<unfinished ...>"):
            begun[thread] = text.removesuffix("<unfinished ...>")
            continue
        if resumed := re.match(r"<\.\.\. \w+ resumed>", text):
            text = begun.pop(thread) + text[resumed.end() :]
        if parts := re.fullmatch(r"(\w+)\((.*)\)\s+= (\d+)\b.*", text):
            yield parts[1], parts[2]


def on_disk(folder: Path) -> Tree:
    """Returns the tree of a real directory."""
    return {
        path.relative_to(folder).as_posix(): None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")
    }


def write(tree: Tree, folder: Path) -> None:
    """Writes a tree into an empty directory."""
    for name, content in tree.items():
        path = folder / name
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
