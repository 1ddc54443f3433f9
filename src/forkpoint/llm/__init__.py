"""Language models: engines, continuations, sessions.

from forkpoint.llm import TransformersEngine, Sampling

engine = TransformersEngine.load("bundled:smollm2")
scene = engine.start("The lighthouse keeper opened the door.")
ending = scene.generate(64, sampling=Sampling(temperature=0.8, seed=7))
ending.commit(repository, "main")
"""

from forkpoint.llm.continuation import Continuation, StreamedToken
from forkpoint.llm.engines.transformers import TransformersEngine
from forkpoint.llm.receipt import Receipt
from forkpoint.llm.sampling import Sampling
from forkpoint.llm.scoring import Score
from forkpoint.llm.session import DecodeSession

__all__ = ["Continuation", "DecodeSession", "Receipt", "Sampling", "Score", "StreamedToken", "TransformersEngine"]
