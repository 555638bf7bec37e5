"""Where a script comes from: a folder of repositories, or GitHub; always into a temporary folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from benchmarks.first_try.entry import Entry

_GIT_S = 900.0


class SourceError(RuntimeError):
    """A repository, or its commit, cannot be had."""


def check_out(entry: Entry, target: Path, sources: Path | None = None) -> None:
    """Write the files of an entry's commit to ``target``.

    Args:
        entry: The entry.
        target: A folder to create.
        sources: Folder with git directories ``OWNER+NAME``, ``OWNER+NAME/repo``, ``OWNER/NAME`` or their ``.git``;
            None to fetch the one commit from GitHub.

    Raises:
        SourceError: If it cannot be had.
    """
    target.mkdir(parents=True)
    if sources is None:
        git_dir = target.parent / f"{target.name}.git"
        _git("init", "--quiet", "--bare", str(git_dir))
        url = f"https://github.com/{entry.repository}"
        _git("--git-dir", str(git_dir), "fetch", "--quiet", "--depth", "1", url, entry.commit)
    else:
        git_dir = _stored(entry.repository, sources)
    archive = target.parent / f"{target.name}.tar"
    absent = [f":(exclude,top,literal){path}" for path in _absent(git_dir, entry.commit)]
    _git("--git-dir", str(git_dir), "archive", "--format", "tar", "--output", str(archive), entry.commit, ".", *absent)
    subprocess.run(["tar", "-xf", str(archive), "-C", str(target)], check=True, timeout=_GIT_S)
    archive.unlink()


def _stored(repository: str, sources: Path) -> Path:
    owner, _, name = repository.partition("/")
    for base in (sources / f"{owner}+{name}", sources / owner / name):
        for result in (base / "repo" / ".git", base / "repo", base / ".git", base, base.with_name(base.name + ".git")):
            if (result / "HEAD").is_file():
                return result
    raise SourceError(f"{repository} is not among {sources}")


def _absent(git_dir: Path, commit: str) -> list[str]:
    """Return the paths of a commit whose content a stored repository lacks: large files may be left out of it."""
    tree = _git("--git-dir", str(git_dir), "ls-tree", "-r", "-z", commit).split("\0")
    blobs = [(line.split()[2], line.partition("\t")[2]) for line in tree if line.split()[1:2] == ["blob"]]
    checked = _git("--git-dir", str(git_dir), "cat-file", "--batch-check", given="\n".join(blob for blob, _ in blobs))
    return [path for (_, path), result in zip(blobs, checked.splitlines(), strict=True) if result.endswith(" missing")]


def _git(*arguments: str, given: str = "") -> str:
    environ = {**os.environ, "GIT_NO_LAZY_FETCH": "1"}
    done = subprocess.run(
        ["git", *arguments], input=given, capture_output=True, text=True, timeout=_GIT_S, check=False, env=environ
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [str(done.returncode)]
        raise SourceError(f"git: {last[0]}")
    return done.stdout
