"""Start every peer and let it process one prompt and a few steps; says which work. The first start of vLLM compiles for minutes.

``check.py`` in the project's own environment; exits 1 where a peer does not work.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from peers.engines import PEERS, Engines, peers


def main() -> None:
    """One after another."""
    working = []
    with Engines(lambda name, why: print(f"peers: {name}: NOT working: {why}", file=sys.stderr)) as engines:
        for spec in peers(2):
            engines.start([spec])
            engines.ask(spec.name, "prefill", context=64, salt=2)
            if engines.ask(spec.name, "decode", lanes=2, context=32, is_shared=True, steps=4) is not None:
                print(f"peers: {spec.name}: works", file=sys.stderr)
                working.append(spec.name)
            engines.end(spec.name)
    sys.exit(0 if len(working) == len(PEERS) else 1)


if __name__ == "__main__":
    main()
