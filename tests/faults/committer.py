"""Commits to ``main`` until it is killed, and says so: one line with the id for each commit that was accepted.

python -m tests.faults.committer <path> <name> [<count>]
"""

from __future__ import annotations

import sys

from tests.repo.drafts import draft_of

from forkpoint.errors import Conflict, NotFound
from forkpoint.ids import ManifestId
from forkpoint.repo.repository import Repository


def commit_next(repo: Repository, name: str, number: int) -> ManifestId:
    """Add one manifest to the tip of main. Raises Conflict when somebody else was first."""
    try:
        tip: ManifestId | None = repo.resolve("main")
    except NotFound:
        tip = None
    history = repo.tokens(tip)[:-1] if tip else []
    draft = draft_of([*history, *name.encode(), number, number * 7], parent=tip, payload={"by": name, "number": number})
    return repo.publish(draft, branch="main", expect="absent" if tip is None else tip).manifest_id


def main(path: str, name: str, count: int) -> None:
    with Repository.open(path, who=name) as repo:
        for number in range(count):
            try:
                print("accepted", commit_next(repo, name, number), flush=True)
            except Conflict:
                print("refused", number, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
