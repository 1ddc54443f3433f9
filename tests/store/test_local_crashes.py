"""Writers that are killed, and writers in other processes: objects are absent or complete, and leftovers are swept."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from tests.store.processes import run, start

from forkpoint.ids import ObjectId, digest_of
from forkpoint.store.local import LocalStore
from forkpoint.testing.store_contract import CHUNK

KILLED_AT_EACH_SYSTEM_CALL = """
import signal

CALLS = ("open", "close", "writev", "fdatasync", "fsync", "replace", "mkdir", "unlink")
OBJECTS = [b"x" * 300_000, b"second", b"third"]

def kill_before_call(number):
    count = 0
    def watched(call):
        def counted(*arguments, **options):
            nonlocal count
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)
        return counted
    for name in CALLS:
        setattr(os, name, watched(getattr(os, name)))

number = 0
while True:
    number += 1
    folder = root / str(number)
    LocalStore(folder).put(new(b"before"))
    child = os.fork()
    if not child:
        store = LocalStore(folder)
        kill_before_call(number)
        store.put_many(new(data[:1], data[1:]) for data in OBJECTS)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    present = []
    store = LocalStore(folder)
    assert list((folder / "tmp").iterdir()) == [], "not swept"
    for object_id in store.scan(CHUNK):
        store.verify(CHUNK, object_id)
        present.append(object_id)
    assert digest_of([b"before"]) in present
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0 and len(present) == 4
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
    store.put_many(map(new, OBJECTS))
    assert all(store.get(CHUNK, digest_of([data])) == data for data in OBJECTS)
    say(f"killed with {len(present) - 1} of 3")
"""

WRITES_UNTIL_KILLED = """
store = LocalStore(root)
number = 0
while True:
    number += 1
    receipts = store.put_many(new(b"%d" % part, os.urandom(100_000 * part)) for part in range(4))
    say(" ".join(receipt.object_id for receipt in receipts))
"""

WAITS_IN_MID_BATCH = """
def batch():
    yield new(b"first")
    yield new(b"second")
    say("staged")
    sys.stdin.readline()
    yield new(b"third")

LocalStore(root).put_many(batch())
say("done")
"""

PUTS_WHAT_OTHERS_PUT = """
store = LocalStore(root)
say("ready")
sys.stdin.readline()
for turn in range(10):
    store.put_many(new(b"%d" % (number % 20) * 20_000) for number in range(turn, turn + 10))
"""


def test_a_writer_killed_before_any_system_call_leaves_each_object_absent_or_complete(tmp_path: Path) -> None:
    said = run(KILLED_AT_EACH_SYSTEM_CALL, tmp_path)
    assert len(said) > 25
    assert {"killed with 0 of 3", "killed with 1 of 3", "killed with 2 of 3", "killed with 3 of 3"} == set(said)


def test_a_writer_killed_at_any_time_loses_nothing_it_acknowledged_and_leaves_nothing_partial(tmp_path: Path) -> None:
    acknowledged: set[ObjectId] = set()
    for _ in range(8):
        with start(WRITES_UNTIL_KILLED, tmp_path) as writer:
            assert writer.stdout
            lines = [writer.stdout.readline()]
            time.sleep(random.uniform(0, 0.05))
            writer.send_signal(signal.SIGKILL)
            lines += writer.stdout.readlines()
        acknowledged.update(ObjectId(word) for line in lines if line.endswith("\n") for word in line.split())
        store = LocalStore(tmp_path)
        assert list((tmp_path / "tmp").iterdir()) == []
    present = set(store.scan(CHUNK))
    assert acknowledged <= present
    for object_id in present:
        store.verify(CHUNK, object_id)


def test_opening_a_store_spares_what_a_live_writer_has_staged(tmp_path: Path) -> None:
    with start(WAITS_IN_MID_BATCH, tmp_path) as writer:
        assert writer.stdout
        assert writer.stdout.readline() == "staged\n"
        staged = sorted(path.name for path in (tmp_path / "tmp").iterdir())
        store = LocalStore(tmp_path)
        assert len(staged) == 3  # two objects and the lock
        assert sorted(path.name for path in (tmp_path / "tmp").iterdir()) == staged
        assert list(store.scan(CHUNK)) == []
        said, _ = writer.communicate("go on\n")
    assert said == "done\n"
    assert set(store.scan(CHUNK)) == {digest_of([data]) for data in (b"first", b"second", b"third")}


def test_opening_a_store_sweeps_what_a_dead_writer_had_staged(tmp_path: Path) -> None:
    with start(WAITS_IN_MID_BATCH, tmp_path) as writer:
        assert writer.stdout
        writer.stdout.readline()
        writer.kill()
        writer.wait()
        assert len(list((tmp_path / "tmp").iterdir())) == 3
    store = LocalStore(tmp_path)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert list(store.scan(CHUNK)) == []


def test_processes_may_put_the_same_objects_at_once(tmp_path: Path) -> None:
    writers = [start(PUTS_WHAT_OTHERS_PUT, tmp_path) for _ in range(3)]
    for writer in writers:
        assert writer.stdout
        writer.stdout.readline()
    for writer in writers:
        assert writer.stdin
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        with writer:
            writer.communicate(timeout=60)
        assert writer.returncode == 0
    store = LocalStore(tmp_path)
    present = list(store.scan(CHUNK))
    assert len(present) == 19
    for object_id in present:
        store.verify(CHUNK, object_id)
    assert list((tmp_path / "tmp").iterdir()) == []
