"""Forkpoint: durable, forkable continuations.

The expensive state behind a computation is an immutable value that can be committed, branched, checked out,
verified and resumed exactly. Importing this package loads neither torch nor SQL: an engine is imported only when one is
asked for (``from forkpoint.llm import TransformersEngine``).
"""

__version__ = "0.1.0"
